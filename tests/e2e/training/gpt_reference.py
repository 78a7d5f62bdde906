"""Real Megatron layers, and their checkpoint names by an independent way: whole rank tensors, put together again."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from torch import Tensor

HIDDEN, INNER, HEADS, GROUPS, HEAD, VOCAB, PADDED = 32, 48, 8, 4, 4, 109, 128
EXPERTS, EXPERT_INNER = 4, 24


def build(kind: str) -> GPTModel:
    """Two layers, tensor parallel over both ranks; kind is "untied", "tied" or "few" (one query group).

    With kind "experts" only these are spread over the ranks (expert parallel).
    """
    experts = kind == "experts"
    tp, ep = (1, dist.get_world_size()) if experts else (dist.get_world_size(), 1)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=1
    )
    moe = {
        "num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_ffn_hidden_size": EXPERT_INNER,
        "moe_token_dispatcher_type": "allgather",
    }  # fmt: skip
    config = TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=1 if kind == "few" else GROUPS,
        ffn_hidden_size=INNER, gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        normalization="RMSNorm", use_cpu_initialization=True, add_qkv_bias=not experts,
        tensor_model_parallel_size=tp, expert_tensor_parallel_size=1, expert_model_parallel_size=ep,
        **(moe if experts else {}),
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS if experts else None, normalization="RMSNorm")
    torch.manual_seed(3)
    return GPTModel(
        config, spec, vocab_size=PADDED, max_sequence_length=16, position_embedding_type="none",
        share_embeddings_and_output_weights=kind == "tied",
    )  # fmt: skip


def optimise(model: GPTModel, kind: str, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A real optimizer step on gradients that are equal where ranks hold the same tensor."""
    for number, (name, parameter) in enumerate(model.named_parameters()):
        replicated = "norm" in name or (kind == "experts" and "local_experts" not in name)
        seed = 1000 * step + 10 * number + (0 if replicated else dist.get_rank())
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    optimizer.step()


def _all(tensor: Tensor) -> list[Tensor]:
    result = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(result, tensor.detach().contiguous())
    return result


def reference(model: GPTModel, kind: str) -> dict[str, Tensor]:
    """The canonical checkpoint in bf16."""
    out: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        cut = kind != "experts" or "local_experts" in name
        ranks = _all(parameter) if cut else [parameter]
        layer = name.replace("decoder.layers.", "model.layers.")
        if "linear_qkv" in name:
            out |= _split_qkv(layer.split(".self_attention")[0], name, torch.cat(ranks), 1 if kind == "few" else GROUPS)
        elif ".mlp." in name:
            out |= _split_mlp(layer.split(".mlp")[0], name, ranks)
        elif "word_embeddings" in name or "output_layer" in name:
            out["lm_head.weight" if "output" in name else "model.embed_tokens.weight"] = torch.cat(ranks)[:VOCAB]
        elif "linear_proj" in name:
            out[layer.replace("self_attention.linear_proj", "self_attn.o_proj")] = torch.cat(ranks, dim=1)
        elif "final_layernorm" in name:
            out["model.norm.weight"] = parameter
        else:
            out[layer.replace("pre_mlp_layernorm", "post_attention_layernorm")] = parameter
    return {name: tensor.detach().to(torch.bfloat16).clone().contiguous() for name, tensor in out.items()}


def _split_qkv(stem: str, name: str, fused: Tensor, groups: int) -> dict[str, Tensor]:
    by_group = fused.reshape(groups, (HEADS // groups + 2) * HEAD, *fused.shape[1:])
    sides = by_group.split([HEADS // groups * HEAD, HEAD, HEAD], dim=1)
    suffix = name.rsplit(".", 1)[1]
    return {f"{stem}.self_attn.{n}_proj.{suffix}": rows.flatten(0, 1) for n, rows in zip("qkv", sides, strict=True)}


def _split_mlp(stem: str, name: str, ranks: list[Tensor]) -> dict[str, Tensor]:
    if "router" in name:
        return {f"{stem}.mlp.gate.weight": ranks[0]}
    halves = [tensor.chunk(2) for tensor in ranks]
    if "local_experts" not in name:
        if "fc2" in name:
            return {f"{stem}.mlp.down_proj.weight": torch.cat(ranks, dim=1)}
        gate, up = (torch.cat(side) for side in zip(*halves, strict=True))
        return {f"{stem}.mlp.gate_proj.weight": gate, f"{stem}.mlp.up_proj.weight": up}
    local = int(name.partition("local_experts.")[2].partition(".")[0])
    out = {}
    for rank, tensor in enumerate(ranks):
        own = f"{stem}.mlp.experts.{rank * (EXPERTS // len(ranks)) + local}"
        if "fc2" in name:
            out[f"{own}.down_proj.weight"] = tensor
        else:
            out[f"{own}.gate_proj.weight"], out[f"{own}.up_proj.weight"] = halves[rank]
    return out
