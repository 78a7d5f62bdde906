"""Cuts matrices into tiles, each in a block of its own, so that a reader that holds a part fetches little else."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from dcr_s3.format.cells import Cells
from dcr_s3.format.region import Region


def tiles(
    number: int, shape: tuple[int, int], cells: Cells, parts: int, limit_bytes: int
) -> Iterator[tuple[Region, Cells]]:
    """Tiles of ``parts`` by ``parts``, cut further by rows where one is larger than ``limit_bytes``.

    ``cells`` are those of tensor ``number``, flat; ``shape`` is its rows and columns in cells. Each tile comes as a
    copy of its cells in the region's order.
    """
    rows, columns = shape
    matrix = cells.reshape(rows, columns)
    for left, right in pairwise(_cuts(columns, parts)):
        step = max(1, limit_bytes // ((right - left) * cells.itemsize))
        for top, bottom in pairwise(_cuts(rows, parts)):
            for first in range(top, bottom, step):
                last = min(first + step, bottom)
                region = Region(number, first * columns + left, (last - first, right - left), (columns, 1))
                yield region, np.ascontiguousarray(matrix[first:last, left:right]).reshape(-1)


def _cuts(extent: int, parts: int) -> list[int]:
    return sorted({extent * part // parts for part in range(parts + 1)})
