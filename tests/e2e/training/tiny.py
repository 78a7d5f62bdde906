"""A small Llama-like model with awkward sizes, and the ways to spread it over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

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
    model = TinyLlama(tie=tie)
    size = dist.get_world_size()
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (size,))
        return _wrap(model, mesh)
    if how == "hsdp":
        return _wrap(model, init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard")))
    if how == "tp":
        _parallelize(model, init_device_mesh("cpu", (size,)))
        return model
    if how == "fsdp_tp":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        _parallelize(model, mesh["tp"])
        return _wrap(model, mesh["dp"])
    raise ValueError(how)


def _wrap(model: nn.Module, mesh: object) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _parallelize(model: nn.Module, mesh: object) -> None:
    for layer in model.layers:
        plan = {f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
        plan |= {
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        parallelize_module(layer, mesh, plan)


def full_state(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The whole state dict, parameters cast: what receivers must hold, by the way of gathering. Collective."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    parameters = dict(inner.named_parameters(remove_duplicate=False))
    state = {}
    for name, tensor in inner.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        state[name] = (whole.to(dtype) if name in parameters else whole).detach().clone().contiguous()
    return state


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, ranks_differ: bool = True) -> None:
    """One real optimizer step on random tokens."""
    generator = torch.Generator().manual_seed(1000 * step + (dist.get_rank() if ranks_differ else 0))
    tokens = torch.randint(VOCAB, (2, 9), generator=generator)
    logits = model(tokens[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
