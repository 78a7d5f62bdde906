"""Parts of a tensor that is cut along its dims: DTensor placements over any mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dcr_s3.errors import BadInput
from dcr_s3.mapping.part import Part
from dcr_s3.mapping.view import View

Interval = tuple[int, int]
"""First index and length, of one dim of a canonical tensor."""


def chunk(held: Sequence[Interval], count: int, index: int) -> list[Interval]:
    """Chunk ``index`` of ``count`` of the indices in ``held``, sizes rounded up as ``torch.chunk`` does; may be
    empty.
    """
    total = sum(length for _, length in held)
    size = -(-total // count)
    first, last = min(index * size, total), min((index + 1) * size, total)
    result, passed = [], 0
    for start, length in held:
        low, high = max(first - passed, 0), min(last - passed, length)
        if low < high:
            result.append((start + low, high - low))
        passed += length
    return result


def held_intervals(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> list[list[Interval]]:
    """Per dim, the indices that the rank at ``coordinate`` of a mesh holds, in local order.

    Raises ValueError for a placement that holds sums instead of values.
    """
    held: list[list[Interval]] = [[(0, extent)] if extent else [] for extent in shape]
    for size, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, _StridedShard):
            dim, factor = placement.dim, int(placement.split_factor)
            pieces = [chunk(chunk(held[dim], factor, j), size, index) for j in range(factor)]
            held[dim] = [interval for piece in pieces for interval in piece]
        elif isinstance(placement, Shard):
            held[placement.dim] = chunk(held[placement.dim], size, index)
        elif not isinstance(placement, Replicate):
            raise ValueError(f"placement {placement}: partial sums are no weights")
    return held


def grid_parts(name: str, shape: Sequence[int], held: Sequence[Sequence[Interval]]) -> Iterator[Part]:
    """Parts of a local tensor that holds, per dim, the given intervals of a canonical tensor one after the other."""
    here = View.of([sum(length for _, length in intervals) for intervals in held])
    starts = []
    for intervals in held:
        at, marks = 0, []
        for start, length in intervals:
            marks.append((start, at, length))
            at += length
        starts.append(marks)
    for cell in product(*starts):
        there_part, here_part = View.of(shape), here
        for dim, (start, at, length) in enumerate(cell):
            there_part = there_part.narrow(dim, start, length)
            here_part = here_part.narrow(dim, at, length)
        yield Part(name, tuple(shape), there_part, here_part)


def local_part(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[Part, ...]]:
    """What this rank holds of a parameter or buffer: its local tensor (memory shared) and the parts of it.

    A plain tensor is held whole. Raises ``BadInput`` for a DTensor that holds partial sums.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach(), tuple(grid_parts(name, tensor.shape, [[(0, n)] for n in tensor.shape]))
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    local = tensor.to_local().detach()
    if coordinate is None:
        return local, ()
    try:
        held = held_intervals(tensor.shape, mesh.shape, coordinate, tensor.placements)
    except ValueError as error:
        raise BadInput(f"tensor {name}: {error}; redistribute it before publishing") from None
    expected = [sum(length for _, length in intervals) for intervals in held]
    if list(local.shape) != expected and local.numel():
        raise BadInput(f"tensor {name}: its local shard is {list(local.shape)}, its placements say {expected}")
    return local, tuple(grid_parts(name, tensor.shape, held))
