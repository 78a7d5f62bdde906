"""Tiny random models of real architectures, and versions of them. Runs where vLLM and transformers are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from safetensors.torch import load_file, save_file

State = dict[str, torch.Tensor]

SIZES = {
    "vocab_size": 250,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen2": lambda: transformers.Qwen2Config(**{**SIZES, "tie_word_embeddings": True}),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "granitemoe": lambda: transformers.GraniteMoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 2
    ),
    "deepseek": lambda: transformers.DeepseekV2Config(
        **{**SIZES, "num_key_value_heads": 4, "head_dim": 64},
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    ),
    "llama4": lambda: transformers.Llama4TextConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=96, moe_layers=[0, 1]
    ),
}
UNUSED_TOKEN = 249


def make_model(name: str, directory: Path, **sizes: int) -> State:
    """Saves a random model as a bf16 checkpoint directory and returns its tensors."""
    torch.manual_seed(len(name))
    config = CONFIGS[name]()
    for key, value in sizes.items():
        setattr(config, key, value)
    config.dtype = "bfloat16"
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return load_directory(directory)


def load_directory(directory: Path) -> State:
    """All tensors of a checkpoint directory."""
    state: State = {}
    for file in sorted(directory.glob("*.safetensors")):
        state.update(load_file(file))
    return state


def save_version(state: State, source: Path, directory: Path) -> Path:
    """Saves ``state`` as a checkpoint of its own, with the configuration of ``source``."""
    directory.mkdir()
    for file in source.glob("*.json"):
        if "index" not in file.name:
            (directory / file.name).write_bytes(file.read_bytes())
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def next_version(state: State, seed: int, share: float = 0.02) -> State:
    """Changes some elements of every tensor by a little, among them a negative zero; and puts a NaN with a payload and
    an infinity into the embedding of a token that no prompt uses.
    """
    rng = torch.Generator().manual_seed(seed)
    result = {}
    for name, tensor in state.items():
        cells = tensor.clone().view(torch.int16)
        mask = torch.rand(tensor.shape, generator=rng) < share
        mask.view(-1)[torch.randint(0, mask.numel(), (2,), generator=rng)] = True
        cells = torch.where(mask, cells ^ torch.randint(1, 8, tensor.shape, generator=rng).to(torch.int16), cells)
        cells.view(-1)[int(torch.randint(0, mask.numel(), (1,), generator=rng))] = -0x8000
        if "embed_tokens" in name and "lm_head.weight" in state:
            cells[UNUSED_TOKEN, :3] = torch.tensor([0x7F81 + seed, 0x7F80, -0x0080], dtype=torch.int16)
        result[name] = cells.view(torch.bfloat16)
    return result
