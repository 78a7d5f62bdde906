"""What a block's cells are given as, and what a comparison of two of them yields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

CELL_TYPES: dict[int, np.dtype[Any]] = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
"""NumPy type of one cell, by its size in bytes."""

Cells = npt.NDArray[Any]
"""One-dimensional contiguous array of unsigned integers, one per cell; may be unaligned, may be read-only."""

Pieces = Sequence[Cells]
"""A block's cells: arrays of one type, walked one after the other."""

Positions = npt.NDArray[np.uint32]


class Changes(NamedTuple):
    """The cells of a block that differ.

    ``positions`` (uint32, strictly ascending) count cells from the block's start; ``old`` and ``new`` hold the bits
    before and after at those positions, in the cells' own unsigned type. All three have one entry per changed cell.
    """

    positions: Positions
    old: Cells
    new: Cells


def total_cells(pieces: Pieces) -> int:
    """Cells in all pieces together."""
    return sum(len(piece) for piece in pieces)


def joined(pieces: Pieces, cell_bytes: int) -> Cells:
    """All cells as one array; the piece itself where there is only one."""
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else np.empty(0, CELL_TYPES[cell_bytes])
