"""Places of cells in memory that stays where it is: found once, then written, read and compared by several threads."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from dcr_s3.delta import kernels
from dcr_s3.delta.changes import Cells, Pieces

_MOST_THREADS = 16


class Places:
    """Some cells of ``cells`` (flat arrays of one type), which are kept alive.

    ``positions`` (int64, strictly ascending) count along all arrays, one after the other. Fastest where the arrays come
    in the order of their addresses. Raises ValueError for positions that are not so.
    """

    def __init__(self, cells: Pieces, positions: npt.NDArray[np.int64]) -> None:
        self.size = positions.size
        self._dtype = cells[0].dtype if cells else np.dtype("u1")
        self._kernels = kernels.active()
        self._places = self._kernels.open_places(cells, positions)
        self._threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))

    def put(self, values: Cells) -> None:
        """Writes ``values``, a cell for every place."""
        self._kernels.put_cells(self._places, values, self._threads)

    def take(self) -> Cells:
        """The cells that the places hold."""
        values = np.empty(self.size, self._dtype)
        self._kernels.take_cells(self._places, values, self._threads)
        return values

    def first_other(self, values: Cells) -> int | None:
        """Number of the first place that does not hold its cell of ``values``; None if all do."""
        found: int = self._kernels.first_other(self._places, values, self._threads)
        return found if found < self.size else None
