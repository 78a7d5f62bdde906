"""Random meshes, placements and uneven shapes: torch cuts a tensor of element numbers, the parts must name them."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dcr_s3.mapping.ownership import Held, assign
from dcr_s3.mapping.part import Part
from dcr_s3.mapping.placements import grid_parts, held_intervals
from dcr_s3.mapping.view import View


def walk(view: View) -> np.ndarray:
    """Element numbers of a view, in its order."""
    index = np.full(view.shape or (1,), view.start, np.int64)
    for dim, (extent, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
        index += (np.arange(extent) * stride).reshape([-1 if d == dim else 1 for d in range(len(view.shape))])
    return index.reshape(-1)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Placement]]:
    shape = tuple(draw(st.lists(st.integers(1, 11), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    placements: list[Placement] = []
    for _ in mesh:
        dim = draw(st.integers(0, len(shape) - 1))
        placements.append(
            draw(st.sampled_from([Replicate(), Shard(dim), _StridedShard(dim, split_factor=draw(st.integers(1, 4)))]))
        )
    return shape, mesh, placements


def torch_cut(
    whole: torch.Tensor, mesh: tuple[int, ...], at: tuple[int, ...], placements: list[Placement]
) -> torch.Tensor:
    local = whole
    for size, index, placement in zip(mesh, at, placements, strict=True):
        if not isinstance(placement, Replicate):
            local = placement._split_tensor(local, size, with_padding=False, contiguous=True)[0][index]
    return local


@given(layouts())
@settings(max_examples=300, deadline=None)
def test_parts_name_the_elements_that_torch_cuts_and_every_element_gets_one_owner(
    layout: tuple[tuple[int, ...], tuple[int, ...], list[Placement]],
) -> None:
    shape, mesh, placements = layout
    whole = torch.arange(prod(shape)).reshape(shape)
    ranks = []
    locals_ = []
    for at in product(*(range(n) for n in mesh)):
        local = torch_cut(whole, mesh, at, placements).reshape(-1).numpy()
        parts = list(grid_parts("w", shape, held_intervals(shape, mesh, at, placements)))
        filled = np.full(local.size, -1)
        for part in parts:
            filled[walk(part.here)] = walk(part.there)
        np.testing.assert_array_equal(filled, local)
        ranks.append([Held("w", "BF16", part) for part in parts])
        locals_.append(local)
    pieces = assign(ranks)
    owned = np.concatenate([walk(piece.there) for piece in pieces])
    np.testing.assert_array_equal(np.sort(owned), np.arange(prod(shape)))
    for piece in pieces:
        assert piece.owner in piece.sides
        for rank, side in piece.sides.items():
            np.testing.assert_array_equal(locals_[rank][walk(side.here)], walk(piece.there))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_order_of_dims_and_any_piece_size_walk_the_same_elements(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    order = data.draw(st.permutations(range(len(shape))))
    there = View.of(shape).permute(*order)
    part = Part("w", shape, there, View.of(there.shape))
    most = data.draw(st.integers(1, prod(shape) + 1))
    chunks = list(part.walked().chunks(most))
    assert all(0 < chunk.there.numel <= most for chunk in chunks)
    pairs = np.concatenate([np.stack([walk(c.there), walk(c.here)]) for c in chunks], axis=1)
    expected = np.stack([walk(part.there), walk(part.here)])
    np.testing.assert_array_equal(pairs[:, np.argsort(pairs[1])], expected)
