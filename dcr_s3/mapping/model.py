"""Shards of a torch model: plain and DDP modules, FSDP2, tensor parallel and their combinations, FSDP1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from dcr_s3.mapping.part import Part, Shard
from dcr_s3.mapping.placements import local_part
from dcr_s3.mapping.view import View

Rename = Callable[[str], str | None]
"""Canonical name of a module's parameter or buffer name; None for one that is not published."""

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def plain_name(name: str) -> str:
    """A name without what FSDP, activation checkpointing and ``torch.compile`` put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def shards_of(model: nn.Module, *, dtype: torch.dtype | None = None, rename: Rename = plain_name) -> list[Shard]:
    """What this rank holds of a model's parameters and persistent buffers; memory is shared, nothing is gathered.

    ``dtype``: what floating-point parameters are served in, their own by default; buffers keep theirs. Tensors that
    share storage (tied weights) come once, with all their names. Raises ``BadInput`` for tensors that cannot be
    published.
    """
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    assert isinstance(inner, nn.Module)
    found: dict[tuple[Any, ...], Shard] = {}
    for shard in _all_shards(inner, dtype, rename):
        place = _storage(shard.tensor) if shard.parts else (shard.key,)
        if place not in found:
            found[place] = shard
        else:
            ties = tuple(part.name for part in shard.parts)
            first = found[place]
            parts = tuple(replace(p, ties=(*p.ties, t)) for p, t in zip(first.parts, ties, strict=True) if t != p.name)
            found[place] = replace(first, parts=parts or first.parts)
    return list(found.values())


def _all_shards(model: nn.Module, dtype: torch.dtype | None, rename: Rename) -> Iterator[Shard]:
    flattened: set[int] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass without a backward pass, parameters may still be whole
    for name, module in model.named_modules():
        handle = getattr(module, "_handle", None) if isinstance(module, FullyShardedDataParallel) else None
        if handle is not None:
            flat = handle.flat_param
            flattened.update(id(p) for p in (flat, *(flat._params or ()), *(flat._shared_params or ())))
            yield _flat_shard(name, flat, dtype, rename)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        canonical = rename(plain_name(name))
        if canonical is not None and id(parameter) not in flattened:
            local, parts = local_part(canonical, parameter)
            yield Shard(name, local, parts, _served(local, dtype))
    for prefix, module in model.named_modules():
        for own, buffer in module._buffers.items():
            name = f"{prefix}.{own}" if prefix else own
            canonical = rename(plain_name(name))
            if buffer is not None and canonical is not None and own not in module._non_persistent_buffers_set:
                local, parts = local_part(canonical, buffer)
                yield Shard(name, local, parts, local.dtype, eager=True)


def _flat_shard(module_name: str, flat: Any, dtype: torch.dtype | None, rename: Rename) -> Shard:
    """FSDP1: this rank's range of one flat parameter, in which every parameter has a range of its own."""
    local: torch.Tensor = flat._local_shard if flat._local_shard is not None else flat.data
    prefix = f"{module_name}." if module_name else ""
    ties: dict[str, list[str]] = {}
    for info in flat._shared_param_infos:
        first = f"{info.prim_module_name}.{info.prim_param_name}".lstrip(".")
        ties.setdefault(first, []).append(f"{info.module_name}.{info.param_name}".lstrip("."))
    parts = []
    for fqn, shape, info in zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True):
        canonical = rename(plain_name(prefix + fqn))
        if canonical is None or not info.in_shard:
            continue
        length = info.numel_in_shard
        others = [rename(plain_name(prefix + other)) for other in ties.get(fqn, ())]
        parts.append(
            Part(
                canonical,
                tuple(shape),
                View(info.intra_param_start_idx, (length,), (1,)),
                View(info.offset_in_shard, (length,), (1,)),
                tuple(other for other in others if other is not None),
            )
        )
    return Shard(f"{prefix}_flat_param", local.detach(), tuple(parts), _served(local, dtype))


def _served(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _storage(tensor: torch.Tensor) -> tuple[Any, ...]:
    if not tensor.numel():
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
