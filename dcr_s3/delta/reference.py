"""The kernels in NumPy: plain, readable, and the oracle that the C extension is held against byte for byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dcr_s3.delta.changes import Cells, Changes, Pieces, Positions, joined

_MASK64 = (1 << 64) - 1
_CHUNK_CELLS = 1 << 18

DIGEST_INDEX = 0x9E3779B1
DIGEST_HIGH = 0xC2B2AE3D
DIGEST_VALUE = 0x85EBCA77
DIGEST_SECOND = 0x27D4EB2F
DIGEST_THIRD = 0x165667B1


def scan(old: Pieces, new: Pieces, cell_bytes: int) -> Changes:
    """Cells whose bits differ between ``old`` and ``new``, which hold equally many."""
    before, after = joined(old, cell_bytes), joined(new, cell_bytes)
    positions = np.flatnonzero(before != after).astype(np.uint32)
    return Changes(positions, before[positions], after[positions])


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
