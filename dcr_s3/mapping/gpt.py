"""Megatron's GPT decoder in the names and shapes of a Llama-like checkpoint (with experts, a Qwen-MoE-like one)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from dcr_s3.errors import BadInput
from dcr_s3.mapping import megatron
from dcr_s3.mapping.megatron import ALONE, Attention, Axis, Parts
from dcr_s3.mapping.part import Shard

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.linear_(fc1|fc2)\.weight$")


@dataclass(frozen=True)
class Gpt:
    """Sizes of the whole model, and this rank's place: tensor, expert and expert-tensor parallel, first layer here.

    ``inner`` are the rows of a gate or up matrix, ``expert_inner`` those of one expert's.
    """

    hidden: int
    inner: int
    heads: int
    groups: int
    head_size: int
    vocabulary: int
    tp: Axis = ALONE
    first_layer: int = 0
    experts: int = 0
    expert_inner: int = 0
    ep: Axis = ALONE
    etp: Axis = ALONE


def gpt_shards(model: nn.Module, sizes: Gpt, *, dtype: torch.dtype | None = None) -> list[Shard]:
    """What this rank holds of a ``GPTModel`` with fused attention and gated MLPs; ``dtype`` as in ``shards_of``.

    An output layer that shares the embedding's weight is tied to it. Raises ``BadInput`` for a parameter that no rule
    describes.
    """
    shards: list[Shard] = []
    tied = bool(getattr(model, "share_embeddings_and_output_weights", False))
    for name, tensor in model.named_parameters():
        parts = _parts(name, tensor, sizes)
        if tied and name == "embedding.word_embeddings.weight":
            parts = tuple(replace(part, ties=("lm_head.weight",)) for part in parts)
        served = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        shards.append(Shard(name, tensor.detach(), parts, served))
    return shards


def _parts(name: str, tensor: torch.Tensor, s: Gpt) -> Parts:
    table = (s.vocabulary, s.hidden)
    padded = tensor.shape[0] * s.tp.size
    if name == "embedding.word_embeddings.weight":
        return megatron.vocabulary("model.embed_tokens.weight", table, s.tp, padded_rows=padded)
    if name == "output_layer.weight":
        return megatron.vocabulary("lm_head.weight", table, s.tp, padded_rows=padded)
    if name == "decoder.final_layernorm.weight":
        return megatron.replicated("model.norm.weight", (s.hidden,))
    if match := _LAYER.match(name):
        prefix = f"model.layers.{int(match.group(1)) + s.first_layer}."
        if expert := _EXPERT.match(match.group(2)):
            return _expert(prefix, int(expert.group(1)), expert.group(2), s)
        if match.group(2) in _LAYER_RULES:
            return _LAYER_RULES[match.group(2)](prefix, s)
    raise BadInput(f"training tensor {name}: no rule says where it goes; describe it by parts of its own")


def _expert(prefix: str, local: int, matrix: str, s: Gpt) -> Parts:
    own = f"{prefix}mlp.experts.{megatron.global_expert(local, s.ep, s.experts)}."
    if matrix == "fc2":
        return megatron.row_parallel(f"{own}down_proj.weight", (s.hidden, s.expert_inner), s.etp)
    shape = (s.expert_inner, s.hidden)
    return megatron.gated(f"{own}gate_proj.weight", f"{own}up_proj.weight", shape, s.etp)


def _qkv(prefix: str, s: Gpt, suffix: str, row_shape: tuple[int, ...]) -> Parts:
    query, key, value = (f"{prefix}self_attn.{n}_proj.{suffix}" for n in "qkv")
    return megatron.fused_qkv(Attention(query, key, value, s.heads, s.groups, s.head_size, row_shape), s.tp)


def _norm(name: str) -> Callable[[str, Gpt], Parts]:
    return lambda prefix, s: megatron.replicated(f"{prefix}{name}.weight", (s.hidden,))


_INPUT_NORM, _MLP_NORM = _norm("input_layernorm"), _norm("post_attention_layernorm")

_LAYER_RULES: dict[str, Callable[[str, Gpt], Parts]] = {
    "input_layernorm.weight": _INPUT_NORM,
    "self_attention.linear_qkv.layer_norm_weight": _INPUT_NORM,
    "pre_mlp_layernorm.weight": _MLP_NORM,
    "mlp.linear_fc1.layer_norm_weight": _MLP_NORM,
    "self_attention.linear_qkv.weight": lambda prefix, s: _qkv(prefix, s, "weight", (s.hidden,)),
    "self_attention.linear_qkv.bias": lambda prefix, s: _qkv(prefix, s, "bias", ()),
    "self_attention.q_layernorm.weight": lambda prefix, s: megatron.replicated(
        f"{prefix}self_attn.q_norm.weight", (s.head_size,)
    ),
    "self_attention.k_layernorm.weight": lambda prefix, s: megatron.replicated(
        f"{prefix}self_attn.k_norm.weight", (s.head_size,)
    ),
    "self_attention.linear_proj.weight": lambda prefix, s: megatron.row_parallel(
        f"{prefix}self_attn.o_proj.weight", (s.hidden, s.heads * s.head_size), s.tp
    ),
    "mlp.linear_fc1.weight": lambda prefix, s: megatron.gated(
        f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight", (s.inner, s.hidden), s.tp
    ),
    "mlp.linear_fc2.weight": lambda prefix, s: megatron.row_parallel(
        f"{prefix}mlp.down_proj.weight", (s.hidden, s.inner), s.tp
    ),
    "mlp.router.weight": lambda prefix, s: megatron.replicated(f"{prefix}mlp.gate.weight", (s.experts, s.hidden)),
}
