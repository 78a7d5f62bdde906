"""A small Llama-like model with awkward sizes, and the ways to spread it over ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from dcr_s3.mapping.conversions import block_fp8, export_hook, full, merged_lora, tied
from dcr_s3.mapping.residual import Residual, Tensors
from dcr_s3.training import Shard, shards_of

CPU = torch.device("cpu")
HIDDEN, INNER, HEADS, VOCAB, LAYERS = 48, 92, 4, 101, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HIDDEN)
        self.k_proj = nn.Linear(HIDDEN, HIDDEN)
        self.v_proj = nn.Linear(HIDDEN, HIDDEN)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), Mlp()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class TinyLlama(nn.Module):
    """fp32 master weights; a persistent integer buffer that every forward pass changes, and one that is not saved."""

    def __init__(self, *, tie: bool = False) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        if tie:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += 1
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def build(how: str, *, tie: bool = False) -> nn.Module:
    """The same weights on all ranks, spread as ``how`` says."""
    torch.manual_seed(7)
    size = dist.get_world_size()
    if how == "adapters":
        return fully_shard(Adapters(), mesh=init_device_mesh("cpu", (size,)))
    return _SPREAD[how](TinyLlama(tie=tie), size)


def _hsdp(model: nn.Module, size: int) -> nn.Module:
    return _wrap(model, init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard")))


def _fsdp_tp(model: nn.Module, size: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    return _wrap(_parallelize(model, mesh["tp"]), mesh["dp"])


def _flatten(model: nn.Module, *, use_orig_params: bool) -> nn.Module:
    for number, layer in enumerate(model.layers):
        model.layers[number] = FullyShardedDataParallel(layer, use_orig_params=use_orig_params, device_id=CPU)
    return FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=CPU)


def _wrap(model: nn.Module, mesh: object) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _parallelize(model: nn.Module, mesh: object) -> nn.Module:
    for layer in model.layers:
        plan = {f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
        plan |= {
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        parallelize_module(layer, mesh, plan)
    return model


_SPREAD = {
    "ddp": lambda model, _: nn.parallel.DistributedDataParallel(model),
    "fsdp1": lambda model, _: _flatten(model, use_orig_params=True),
    "fsdp1_flat": lambda model, _: _flatten(model, use_orig_params=False),
    "fsdp": lambda model, size: _wrap(model, init_device_mesh("cpu", (size,))),
    "hsdp": _hsdp,
    "tp": lambda model, size: _parallelize(model, init_device_mesh("cpu", (size,))),
    "fsdp_tp": _fsdp_tp,
}


def full_state(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The whole state dict, parameters cast: what receivers must hold, by the way of gathering. Collective."""
    if isinstance(model, FullyShardedDataParallel):
        whole = model.state_dict()  # FSDP1 gathers by itself; floats are parameters in this model
        return {n: (t.to(dtype) if t.is_floating_point() else t).clone().contiguous() for n, t in whole.items()}
    return _plain_state(model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model, dtype)


def _plain_state(inner: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    parameters = dict(inner.named_parameters(remove_duplicate=False))
    state = {}
    for name, tensor in inner.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        state[name] = (whole.to(dtype) if name in parameters else whole).detach().clone().contiguous()
    return state


def data_rank(how: str) -> int:
    """Tensor-parallel ranks read the same data."""
    return {"tp": 0, "fsdp_tp": dist.get_rank() // 2}.get(how, dist.get_rank())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, reader: int) -> None:
    """One real optimizer step on random tokens; ``reader`` is the data rank."""
    generator = torch.Generator().manual_seed(1000 * step + reader)
    tokens = torch.randint(VOCAB, (2, 9), generator=generator)
    logits = model(tokens[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def load_full(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Copies whole tensors into a model that is spread over ranks."""
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if isinstance(tensor, DTensor):
                tensor.copy_(distribute_tensor(state[name], tensor.device_mesh, tensor.placements))
            else:
                tensor.copy_(state[name])


class Adapters(nn.Module):
    """A frozen matrix with a low-rank update, a matrix that is served in fp8, and a head that is stored twice."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(70, 40).bfloat16())
        self.lora_a = nn.Parameter(torch.randn(4, 40).bfloat16())
        self.lora_b = nn.Parameter(torch.randn(70, 4).bfloat16())
        self.register_buffer("scale", torch.tensor([0.25]))
        self.quantised = nn.Linear(50, 33, bias=False)
        self.head = nn.Linear(40, 9, bias=False)


def adapter_layout(model: nn.Module) -> list[Shard]:
    """Only the head is a plain shard; all else is converted."""
    return shards_of(model, dtype=torch.bfloat16, rename=lambda name: name if name.startswith("head") else None)


def adapter_rules(calls: dict[str, int]) -> list[Residual]:
    """``calls`` counts conversions; its entry "fail" makes the export hook fail."""
    lora = merged_lora("merged", "frozen", "lora_a", "lora_b", "scale")

    def counted(tensors: Tensors) -> Mapping[str, Tensor | Shard]:
        calls["lora"] = calls.get("lora", 0) + 1
        return lora.convert(tensors)

    def export(tensors: Tensors) -> Mapping[str, Tensor]:
        norms = full(tensors["lora_a"]).float().norm(dim=1)
        if calls.get("fail"):
            raise ZeroDivisionError("no such export")
        return {"norms": norms}

    return [
        Residual(lora.outputs, lora.inputs, counted),
        block_fp8("q.weight", "q.scale", "quantised.weight", block=(16, 16)),
        tied("copy_of_head", "head.weight"),
        export_hook(["norms"], export),
    ]


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """What receivers must hold, computed from whole tensors."""
    whole = {name: full(p).detach() for name, p in [*model.named_parameters(), *model.named_buffers()]}
    merged = whole["frozen"] + ((whole["lora_b"] @ whole["lora_a"]) * whole["scale"]).to(torch.bfloat16)
    weight, scale = whole["quantised.weight"], torch.empty(3, 4)
    values = torch.empty(33, 50, dtype=torch.float8_e4m3fn)
    for i in range(3):
        for j in range(4):
            tile = weight[16 * i : 16 * i + 16, 16 * j : 16 * j + 16]
            scale[i, j] = tile.abs().max() / 448
            values[16 * i : 16 * i + 16, 16 * j : 16 * j + 16] = (tile / scale[i, j]).to(torch.float8_e4m3fn)
    return {
        "merged": merged,
        "q.weight": values,
        "q.scale": scale,
        "head.weight": whole["head.weight"].bfloat16(),
        "copy_of_head": whole["head.weight"],
        "norms": whole["lora_a"].float().norm(dim=1),
    }
