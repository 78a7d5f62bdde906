"""The kernels in C: same functions and, byte for byte, same results as the NumPy reference."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from dcr_s3.delta import _native
from dcr_s3.delta.changes import CELL_TYPES, Cells, Changes, Pieces, Positions, total_cells
from dcr_s3.delta.fields import Fields, Order
from dcr_s3.delta.model import HazardModel, Tally
from dcr_s3.delta.tables import CLASSES, MIN_UNIT_BITS, SURVIVAL
from dcr_s3.errors import CorruptObject

_SCHEME = struct.Struct("<8I16H")
_DONE = 0
_BAD_POSITIONS = 7
_CORRUPT = {
    2: "a clock-coded stream points outside its range",
    3: "a clock-coded block has a change beyond its last cell",
    4: "a clock-coded stream is longer or shorter than what it codes",
    5: "a clock-coded block steps outside its type's values",
    6: "a clock-coded block has more signs than changes",
    8: "a clock-coded block's halves do not fit it",
}
_CHUNK_CELLS = 4096
"""The scan wants room for this many more changes than it finds."""

_native.set_survival(SURVIVAL)


def tally(old: Pieces, new: Pieces, fields: Fields, stride_log2: int) -> Tally:
    cells, changed = np.zeros((2, fields.exponent_mask + 1), np.uint64)
    _native.tally(old, new, _scheme(fields), stride_log2, cells, changed)
    return Tally(cells.tolist(), changed.tolist(), stride_log2 > 0)


def count_exponents(cells: Cells, fields: Fields) -> list[int]:
    counts = np.zeros(fields.exponent_mask + 1, np.uint64)
    _native.count_exponents(cells, _scheme(fields), counts)
    result: list[int] = counts.tolist()
    return result


def scan(old: Pieces, new: Pieces, cell_bytes: int, density: float) -> Changes:
    return _scan(old, new, _scheme(Fields(cell_bytes, Order.UNSIGNED, 0, 0)), cell_bytes, density, coded=False)[0]


def scan_positions(
    old: Pieces, new: Pieces, fields: Fields, model: HazardModel, density: float
) -> tuple[Changes, bytes]:
    changes, stream = _scan(old, new, _scheme(fields, model), fields.cell_bytes, density, coded=True)
    return changes, stream or b""


def _scan(
    old: Pieces, new: Pieces, scheme: bytes, cell_bytes: int, density: float, *, coded: bool
) -> tuple[Changes, bytes | None]:
    """Makes room for what a sample promised; where there is more, counts it and starts again."""
    capacity = int(total_cells(old) * density * 1.125) + 2 * _CHUNK_CELLS
    while True:
        positions = np.empty(capacity, np.uint32)
        before, after = np.empty((2, capacity), CELL_TYPES[cell_bytes])
        count, fits, stream = _native.scan(old, new, scheme, positions, before, after, coded)
        if fits:
            return Changes(positions[:count], before[:count], after[:count]), stream
        capacity = count + _CHUNK_CELLS


def encode_positions(cells: Pieces, positions: Positions, fields: Fields, model: HazardModel) -> bytes:
    return _native.encode_positions(cells, _scheme(fields, model), positions)


def decode_positions(
    stream: bytes | memoryview, changed: int, cells: Pieces, fields: Fields, model: HazardModel
) -> tuple[Positions, Cells]:
    positions = np.empty(changed, np.uint32)
    before = np.empty(changed, CELL_TYPES[fields.cell_bytes])
    _check(_native.decode_positions(cells, _scheme(fields, model), stream, positions, before))
    return positions, before


def encode_values(old: Cells, new: Cells, fields: Fields, model: HazardModel) -> tuple[bytes, bytes]:
    signs = bytearray((len(old) + 7) // 8)
    stream = _native.encode_values(_scheme(fields, model), old, new, signs)
    return bytes(signs), stream


def decode_values(
    signs: bytes | memoryview, stream: bytes | memoryview, old: Cells, fields: Fields, model: HazardModel
) -> Cells:
    after = np.empty_like(old)
    _check(_native.decode_values(_scheme(fields, model), signs, stream, old, after))
    return after


def apply_changes(dest: Pieces, positions: Positions, values: Cells) -> None:
    if _native.apply_changes(dest, values.itemsize, positions, values) == _BAD_POSITIONS:
        raise ValueError("positions are not strictly ascending cells of the block")


def digest_range(key: tuple[int, int, int, int], start: int, cells: Cells) -> tuple[int, int]:
    return _native.digest_range(key, start, cells, cells.itemsize)


def digest_at(key: tuple[int, int, int, int], indices: npt.NDArray[np.uint64], cells: Cells) -> tuple[int, int]:
    return _native.digest_at(key, np.ascontiguousarray(indices, np.uint64), cells, cells.itemsize)


def open_places(cells: Pieces, positions: npt.NDArray[np.int64]) -> object:
    places = _native.open_places(cells, cells[0].itemsize if cells else 1, np.ascontiguousarray(positions, np.int64))
    if places is None:
        raise ValueError("positions are not strictly ascending cells")
    return places


def put_cells(places: object, values: Cells, threads: int) -> None:
    _native.put_cells(places, values, threads)


def take_cells(places: object, values: Cells, threads: int) -> None:
    _native.take_cells(places, values, threads)


def first_other(places: object, values: Cells, threads: int) -> int:
    return _native.first_other(places, values, threads)


def _scheme(fields: Fields, model: HazardModel | None = None) -> bytes:
    """The C kernels' view of an element type and a block's hazards."""
    numbers = (fields.cell_bytes, fields.order, fields.exponent_shift, fields.exponent_mask)
    if model is None:
        return _SCHEME.pack(*numbers, 1, 0, MIN_UNIT_BITS, 0, *(0,) * CLASSES)
    hazards = model.hazards.tolist()
    hazards += [0] * (CLASSES - len(hazards))
    header = (len(model.codes), model.first_exponent, model.unit_bits, model.halved)
    return _SCHEME.pack(*numbers, *header, *hazards)


def _check(outcome: int) -> None:
    if outcome != _DONE:
        raise CorruptObject(_CORRUPT[outcome])
