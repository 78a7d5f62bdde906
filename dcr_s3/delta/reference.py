"""The kernels in NumPy: plain, readable, and the oracle that the C extension is held against byte for byte."""

from __future__ import annotations

import bisect
import itertools
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from dcr_s3.delta.changes import Cells, Changes, Pieces, Positions, joined
from dcr_s3.delta.fields import Fields
from dcr_s3.delta.model import HazardModel, Tally
from dcr_s3.delta.rangecoder import RangeDecoder, RangeEncoder
from dcr_s3.delta.tables import ROUND_CLOCK, TOTAL_BITS, survival
from dcr_s3.errors import CorruptObject

_MASK64 = (1 << 64) - 1
_CHUNK_CELLS = 1 << 18

DIGEST_INDEX = 0x9E3779B1
DIGEST_HIGH = 0xC2B2AE3D
DIGEST_VALUE = 0x85EBCA77
DIGEST_SECOND = 0x27D4EB2F
DIGEST_THIRD = 0x165667B1

SAMPLE_CELLS = 256
SAMPLE_SCATTER = 0x9E3779B1
RAW_BITS = 16
"""Bits of a step that are coded as one symbol, even odds."""
MAX_LENGTH = 63
FLAGS = 2 + MAX_LENGTH + 1
SLOWEST_RATE = 7
HALVES = struct.Struct("<II")
"""Changes in the first half of a block, and bytes of their stream."""

_TOTAL = 1 << TOTAL_BITS
_TAIL = survival(ROUND_CLOCK)


def tally(old: Pieces, new: Pieces, fields: Fields, stride_log2: int) -> Tally:
    """Counts per exponent of the old cell, over one run of 256 cells in every 2**stride_log2 of them.

    Which run is taken varies from one group of runs to the next, so that no column of a matrix is missed.
    """
    before, after = joined(old, fields.cell_bytes), joined(new, fields.cell_bytes)
    run = np.arange(len(before), dtype=np.uint64) // np.uint64(SAMPLE_CELLS)
    group = run >> np.uint64(stride_log2)
    taken = (group * np.uint64(SAMPLE_SCATTER) & np.uint64(0xFFFFFFFF)) >> np.uint64(32 - stride_log2)
    sample = (run & np.uint64((1 << stride_log2) - 1)) == taken
    before, after = before[sample], after[sample]
    changed = before[before != after]
    return Tally(count_exponents(before, fields), count_exponents(changed, fields), stride_log2 > 0)


def count_exponents(cells: Cells, fields: Fields) -> list[int]:
    """Cells per exponent field."""
    exponents = fields.exponents(cells).astype(np.int64)
    counts: list[int] = np.bincount(exponents, minlength=fields.exponent_mask + 1).tolist()
    return counts


def scan(old: Pieces, new: Pieces, cell_bytes: int, density: float) -> Changes:
    """Cells whose bits differ between ``old`` and ``new``, which hold equally many.

    ``density``, the share of cells that probably differ, is a hint for implementations that reserve memory.
    """
    before, after = joined(old, cell_bytes), joined(new, cell_bytes)
    positions = np.flatnonzero(before != after).astype(np.uint32)
    return Changes(positions, before[positions], after[positions])


def scan_positions(
    old: Pieces, new: Pieces, fields: Fields, model: HazardModel, density: float
) -> tuple[Changes, bytes]:
    """:func:`scan` and :func:`encode_positions` of what it finds, in one pass where that is faster."""
    changes = scan(old, new, fields.cell_bytes, density)
    return changes, encode_positions(old, changes.positions, fields, model)


def gather(cells: Pieces, positions: Positions, cell_bytes: int) -> Cells:
    """The cells at ascending ``positions``."""
    return joined(cells, cell_bytes)[positions]


def apply_changes(dest: Pieces, positions: Positions, values: Cells) -> None:
    """Write ``values`` at ascending ``positions`` of ``dest``. Raises ValueError where a position is outside."""
    ends = np.cumsum([len(piece) for piece in dest], dtype=np.int64)
    if len(positions) and (not len(ends) or positions[-1] >= ends[-1] or np.any(positions[1:] <= positions[:-1])):
        raise ValueError("positions are not strictly ascending cells of the block")
    cuts = np.searchsorted(positions, ends)
    first = 0
    for piece, end, last in zip(dest, ends, cuts, strict=True):
        piece[positions[first:last].astype(np.int64) - (end - len(piece))] = values[first:last]
        first = last


def encode_positions(cells: Pieces, positions: Positions, fields: Fields, model: HazardModel) -> bytes:
    """Range-coded streams of ascending ``positions``, one for the block or one for each half of it."""
    clocks = _clocks(cells, fields, model)
    if not model.halved:
        return _encode_run(clocks, positions)
    half = len(clocks) // 2
    cut = int(np.searchsorted(positions, half))
    first = _encode_run(clocks[:half], positions[:cut])
    second = _encode_run(clocks[half:] - clocks[half - 1], positions[cut:] - np.uint32(half))
    return HALVES.pack(cut, len(first)) + first + second


def decode_positions(
    stream: bytes | memoryview, changed: int, cells: Pieces, fields: Fields, model: HazardModel
) -> tuple[Positions, Cells]:
    """Inverse of :func:`encode_positions`: positions, and the old cells there. Raises CorruptObject."""
    clocks = _clocks(cells, fields, model)
    if not model.halved:
        positions = _decode_run(stream, changed, clocks)
    else:
        half = len(clocks) // 2
        cut, length = HALVES.unpack_from(stream) if len(stream) >= HALVES.size else (changed + 1, 0)
        if cut > changed or HALVES.size + length > len(stream) or not half:
            raise CorruptObject("a clock-coded block's halves do not fit it")
        first = _decode_run(stream[HALVES.size : HALVES.size + length], cut, clocks[:half])
        second = _decode_run(stream[HALVES.size + length :], changed - cut, clocks[half:] - clocks[half - 1])
        positions = np.concatenate((first, second + np.uint32(half)))
    return positions, gather(cells, positions, fields.cell_bytes)


def _encode_run(clocks: npt.NDArray[np.int64], positions: Positions) -> bytes:
    """A stream with a symbol for each position, and one for every 8 bits of clock without a change."""
    coder = RangeEncoder()
    base = 0
    for position in positions.tolist():
        end = int(clocks[position])
        start = int(clocks[position - 1]) if position else 0
        while start - base >= ROUND_CLOCK:
            coder.encode(_TOTAL - _TAIL, _TAIL, TOTAL_BITS)
            base += ROUND_CLOCK
        upper, lower = survival(start - base), survival(min(end - base, ROUND_CLOCK))
        coder.encode(_TOTAL - upper, upper - lower, TOTAL_BITS)
        base = end
    return coder.finish()


def _decode_run(stream: bytes | memoryview, changed: int, clocks: npt.NDArray[np.int64]) -> Positions:
    coder = RangeDecoder(stream)
    positions = np.empty(changed, np.uint32)
    base = 0
    for number in range(changed):
        while (point := coder.point(TOTAL_BITS)) >= _TOTAL - _TAIL:
            coder.consume(_TOTAL - _TAIL, _TAIL, TOTAL_BITS)
            base += ROUND_CLOCK
            if base > clocks[-1]:
                raise CorruptObject("a clock-coded block has a change beyond its last cell")
        clock = bisect.bisect_right(range(ROUND_CLOCK), point, key=lambda s: _TOTAL - survival(s)) - 1
        position = int(np.searchsorted(clocks, base + clock, "right"))
        if position >= len(clocks):
            raise CorruptObject("a clock-coded block has a change beyond its last cell")
        end = int(clocks[position])
        start = int(clocks[position - 1]) if position else 0
        upper, lower = survival(max(start - base, 0)), survival(min(end - base, ROUND_CLOCK))
        coder.consume(_TOTAL - upper, upper - lower, TOTAL_BITS)
        positions[number] = position
        base = end
    coder.finish()
    return positions


def _clocks(cells: Pieces, fields: Fields, model: HazardModel) -> npt.NDArray[np.int64]:
    """The clock after each cell: the sum of hazards up to and with it, in units of 2**-24 bit."""
    flat = joined(cells, fields.cell_bytes)
    hazards = model.hazards.astype(np.int64) << model.shift
    per_cell = hazards[fields.classes(flat, model)] if len(hazards) > 1 else np.full(len(flat), hazards[0])
    return np.cumsum(per_cell)


def encode_values(old: Cells, new: Cells, fields: Fields, model: HazardModel) -> tuple[bytes, bytes]:
    """Signs (bit n % 8 of byte n // 8 is set where cell n grew) and the range-coded stream of step sizes."""
    before, after = fields.ordered(old), fields.ordered(new)
    grew = after > before
    steps = np.where(grew, after - before, before - after)
    flags = _AdaptiveFlags(len(model.codes))
    coder = RangeEncoder()
    for step, group in zip(steps.tolist(), fields.classes(old, model).tolist(), strict=True):
        _encode_step(coder, flags, group, step)
    return np.packbits(grew, bitorder="little").tobytes(), coder.finish()


def decode_values(
    signs: bytes | memoryview, stream: bytes | memoryview, old: Cells, fields: Fields, model: HazardModel
) -> Cells:
    """Inverse of :func:`encode_values`: the new cells. Raises CorruptObject."""
    bits = np.unpackbits(np.frombuffer(signs, np.uint8), bitorder="little")
    if bits[len(old) :].any():
        raise CorruptObject("a clock-coded block has more signs than changes")
    flags = _AdaptiveFlags(len(model.codes))
    coder = RangeDecoder(stream)
    limit = (1 << 8 * fields.cell_bytes) - 1
    result = []
    groups = fields.classes(old, model).tolist()
    for before, grew, group in zip(fields.ordered(old).tolist(), bits.tolist(), groups, strict=False):
        step = _decode_step(coder, flags, group)
        after = before + step if grew else before - step
        if not 0 <= after <= limit:
            raise CorruptObject("a clock-coded block steps outside its type's values")
        result.append(after)
    coder.finish()
    return fields.unordered(np.array(result, old.dtype))


def _encode_step(coder: RangeEncoder, flags: _AdaptiveFlags, group: int, step: int) -> None:
    """Flags "more than 1", "more than 2", then an exponential Golomb code of the rest with adaptive length flags."""
    flags.encode(coder, group, 0, step > 1)
    if step == 1:
        return
    flags.encode(coder, group, 1, step > 2)
    if step == 2:
        return
    length = (step - 2).bit_length() - 1
    for number in range(length + 1):
        flags.encode(coder, group, 2 + number, number < length)
    for low in range(0, length, RAW_BITS):
        width = min(RAW_BITS, length - low)
        coder.encode((step - 2) >> low & ((1 << width) - 1), 1, width)


def _decode_step(coder: RangeDecoder, flags: _AdaptiveFlags, group: int) -> int:
    if not flags.decode(coder, group, 0):
        return 1
    if not flags.decode(coder, group, 1):
        return 2
    length = 0
    while flags.decode(coder, group, 2 + length):
        length += 1
        if length > MAX_LENGTH:
            raise CorruptObject("a clock-coded block has an oversized step")
    rest = 1 << length
    for low in range(0, length, RAW_BITS):
        width = min(RAW_BITS, length - low)
        digit = coder.point(width)
        coder.consume(digit, 1, width)
        rest |= digit << low
    return rest + 2


class _AdaptiveFlags:
    """Chances of flags, per class of cells and flag, learnt as they are coded: fast at first, then by 1/128."""

    def __init__(self, classes: int) -> None:
        self._chances = [[1 << 15] * FLAGS for _ in range(classes)]
        self._seen = [[0] * FLAGS for _ in range(classes)]

    def encode(self, coder: RangeEncoder, group: int, number: int, flag: bool) -> None:
        coder.encode_flag(flag, self._chances[group][number])
        self._learn(group, number, flag)

    def decode(self, coder: RangeDecoder, group: int, number: int) -> bool:
        flag = coder.flag(self._chances[group][number])
        self._learn(group, number, flag)
        return flag

    def _learn(self, group: int, number: int, flag: bool) -> None:
        chance, seen = self._chances[group][number], self._seen[group][number]
        rate = min((seen + 1).bit_length(), SLOWEST_RATE)
        self._chances[group][number] = chance - (chance >> rate) if flag else chance + ((65536 - chance) >> rate)
        self._seen[group][number] = min(seen + 1, 1 << SLOWEST_RATE)


def digest_range(key: tuple[int, int, int, int], start: int, cells: Cells) -> tuple[int, int]:
    """Both sums over contiguous cells from canonical cell index ``start``."""
    low = high = 0
    for first in range(0, len(cells), _CHUNK_CELLS):
        chunk = cells[first : first + _CHUNK_CELLS]
        indices = np.arange(len(chunk), dtype=np.uint64) + np.uint64(start + first)
        terms = digest_at(key, indices, chunk)
        low, high = (low + terms[0]) & _MASK64, (high + terms[1]) & _MASK64
    return low, high


def digest_at(key: tuple[int, int, int, int], indices: npt.NDArray[np.uint64], cells: Cells) -> tuple[int, int]:
    """Both sums over cells at canonical cell ``indices``; a cell of 8 bytes counts as two words of 4."""
    indices = np.asarray(indices, np.uint64)
    if cells.itemsize < 8:
        return _sum_words(key, indices, cells.astype(np.uint32))
    low = _sum_words(key, indices * np.uint64(2), (cells & np.uint64(0xFFFFFFFF)).astype(np.uint32))
    high = _sum_words(key, indices * np.uint64(2) + np.uint64(1), (cells >> np.uint64(32)).astype(np.uint32))
    return (low[0] + high[0]) & _MASK64, (low[1] + high[1]) & _MASK64


def _sum_words(
    key: tuple[int, int, int, int], indices: npt.NDArray[np.uint64], words: npt.NDArray[np.uint32]
) -> tuple[int, int]:
    """A keyed Feistel network over (index, word), all modulo 2**32, then two products of 32 by 32 bits."""
    k0, k1, k2, k3 = (np.uint32(k) for k in key)
    a = indices.astype(np.uint32) * np.uint32(DIGEST_INDEX) + k0
    a += (indices >> np.uint64(32)).astype(np.uint32) * np.uint32(DIGEST_HIGH)
    a ^= a >> np.uint32(15)
    b = (words + a) * np.uint32(DIGEST_VALUE)
    b ^= b >> np.uint32(16)
    a = (a + b) * np.uint32(DIGEST_SECOND)
    a ^= a >> np.uint32(15)
    c = (a ^ k1) * np.uint32(DIGEST_THIRD)
    c ^= c >> np.uint32(16)
    return _sum_products(a, b ^ k2), _sum_products(c, b + k3)


def _sum_products(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> int:
    return int(np.sum(left.astype(np.uint64) * right.astype(np.uint64), dtype=np.uint64))


Places = tuple[list[Cells], list[slice], list[npt.NDArray[np.int64]]]
"""Pieces that have places, which of the places lie in each, and their cells in it."""


def open_places(cells: Pieces, positions: npt.NDArray[np.int64]) -> Places:
    """Raises ValueError where positions are not strictly ascending cells of the pieces."""
    starts = np.cumsum([0, *(len(piece) for piece in cells)])
    if positions.size and (np.diff(positions).min(initial=1) <= 0 or positions[0] < 0 or positions[-1] >= starts[-1]):
        raise ValueError("positions are not strictly ascending cells")
    cuts = np.searchsorted(positions, starts).tolist()
    spans = [slice(*cut) for cut in itertools.pairwise(cuts)]
    return list(cells), spans, [positions[s] - start for s, start in zip(spans, starts, strict=False)]


def put_cells(places: Places, values: Cells, threads: int) -> None:
    """Writes a cell to every place."""
    for piece, span, at in zip(*places, strict=True):
        piece[at] = values[span]


def take_cells(places: Places, values: Cells, threads: int) -> None:
    """Reads the cell of every place into ``values``."""
    for piece, span, at in zip(*places, strict=True):
        values[span] = piece[at]


def first_other(places: Places, values: Cells, threads: int) -> int:
    """Number of the first place that does not hold what ``values`` says; their count where there is none."""
    held = np.empty_like(values)
    take_cells(places, held, threads)
    return int(np.append(held != values, True).argmax())
