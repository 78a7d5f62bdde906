"""Regions against the plain definition: nested loops."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcr_s3.format.region import Region, pack_regions, split_positions, unpack_regions


@st.composite
def regions(draw: st.DrawFn, tensor: int = 0) -> Region:
    dims = draw(st.integers(1, 4))
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=dims, max_size=dims)))
    strides = tuple(draw(st.lists(st.integers(0, 30), min_size=dims, max_size=dims)))
    return Region(tensor, draw(st.integers(0, 50)), shape, strides)


def plain_indices(region: Region) -> list[int]:
    return [
        region.start + sum(i * s for i, s in zip(place, region.strides, strict=True))
        for place in itertools.product(*(range(n) for n in region.shape))
    ]


@given(regions())
def test_canonical_and_gather_follow_the_definition(region: Region) -> None:
    expected = plain_indices(region)
    positions = np.arange(region.cells, dtype=np.uint32)
    cells = np.arange(max(expected) + 1, dtype=np.uint16)
    assert region.canonical(positions).tolist() == expected
    gathered = region.gather(cells)
    assert gathered.tolist() == expected
    assert gathered.flags.c_contiguous


@given(regions())
def test_check_accepts_exactly_the_tensors_that_hold_the_region(region: Region) -> None:
    needed = max(plain_indices(region)) + 1
    region.check(needed)
    with pytest.raises(ValueError, match="reaches"):
        region.check(needed - 1)


@given(st.lists(regions(), max_size=6))
def test_packed_regions_come_back(given_regions: list[Region]) -> None:
    raw = pack_regions(given_regions)
    assert unpack_regions(raw, 0, len(given_regions)) == (tuple(given_regions), len(raw))


@given(st.lists(regions(), min_size=1, max_size=6), st.data())
def test_positions_are_split_by_region(given_regions: list[Region], data: st.DataObject) -> None:
    total = sum(r.cells for r in given_regions)
    chosen = np.array(sorted(data.draw(st.sets(st.integers(0, total - 1)))), dtype=np.uint32)
    owner = [(number, i) for number, region in enumerate(given_regions) for i in range(region.cells)]
    found = [
        (next(n for n, r in enumerate(given_regions) if r is region), int(p) - first)
        for region, span, first in split_positions(given_regions, chosen)
        for p in chosen[span]
    ]
    assert found == [owner[p] for p in chosen]


def test_damaged_regions_are_refused() -> None:
    raw = pack_regions([Region.run(0, 0, 4)])
    for bad in (raw[:-1], raw[:4] + b"\xff" * 4 + raw[8:], raw[:8] + b"\xff" * 8 + raw[16:]):
        with pytest.raises(ValueError, match=r"regions?"):
            unpack_regions(bad, 0, 1)
