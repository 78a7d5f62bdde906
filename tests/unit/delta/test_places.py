"""Places are written, read and compared alike by both kernels, over many pieces and by many threads."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import numpy as np
import pytest

from dcr_s3.delta import Places, kernels
from dcr_s3.delta.changes import CELL_TYPES
from dcr_s3.format.cells import Cells

BUILT = importlib.util.find_spec("dcr_s3.delta._native") is not None


@pytest.fixture(params=["reference", pytest.param("native", marks=pytest.mark.skipif(not BUILT, reason="not built"))])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    chosen = importlib.import_module(f"dcr_s3.delta.{request.param}")
    monkeypatch.setattr(kernels, "active", lambda: chosen)
    return chosen


def pieces_of(rng: np.random.Generator, width: int, sizes: list[int]) -> list[Cells]:
    """Arrays of these sizes, some at odd addresses, in any order in memory."""
    made = []
    for size in sizes:
        room = rng.integers(0, 256, size * width + 1, np.uint8)
        made.append(room[1:].view(CELL_TYPES[width]) if rng.integers(2) else room[:-1].view(CELL_TYPES[width]))
    return made


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("sizes", [[1], [0, 700, 0, 1, 4000, 0], [400_000, 3, 0, 500_000]])
def test_cells_reach_their_places_and_no_others(kernel: ModuleType, width: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(width)
    pieces = pieces_of(rng, width, sizes)
    before = np.concatenate(pieces)
    positions = np.flatnonzero(rng.random(before.size) < 0.4).astype(np.int64)
    places = Places(pieces, positions)
    np.testing.assert_array_equal(places.take(), before[positions])
    new = ~before[positions]
    assert places.first_other(new) == (0 if new.size else None)
    places.put(new)
    assert places.first_other(new) is None
    before[positions] = new
    np.testing.assert_array_equal(np.concatenate(pieces), before)


def test_the_first_of_several_differences_is_found(kernel: ModuleType) -> None:
    cells = np.zeros(600_000, "<u2")
    positions = np.arange(0, cells.size, 2, dtype=np.int64)
    places = Places([cells], positions)
    expected = np.zeros(positions.size, "<u2")
    for wrong in (299_999, 123_457, 70_001, 5):
        cells[2 * wrong] = 1
        assert places.first_other(expected) == wrong


@pytest.mark.parametrize("positions", [[1, 1], [2, 1], [-1], [0, 10], [10]])
def test_positions_that_are_not_ascending_cells_are_refused(kernel: ModuleType, positions: list[int]) -> None:
    with pytest.raises(ValueError, match="strictly ascending"):
        Places([np.zeros(4, "<u2"), np.zeros(6, "<u2")], np.array(positions, np.int64))


def test_nothing_to_do(kernel: ModuleType) -> None:
    for pieces in ([], [np.zeros(3, "<u4")]):
        places = Places(pieces, np.empty(0, np.int64))
        places.put(np.empty(0, "<u4"))
        assert places.first_other(places.take()) is None


@pytest.mark.skipif(not BUILT, reason="not built")
def test_too_few_values_are_refused() -> None:
    native = importlib.import_module("dcr_s3.delta.native")
    places = native.open_places([np.zeros(4, "<u2")], np.arange(4))
    for call in (native.put_cells, native.take_cells, native.first_other):
        with pytest.raises(ValueError, match="too small"):
            call(places, np.zeros(3, "<u2"), 1)
    with pytest.raises(ValueError, match="size that no type has"):
        native._native.open_places([np.zeros(4, "<u2")], 3, np.arange(1))
