"""A region: a strided box of one canonical tensor, the one coordinate everything is said in."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from dcr_s3.format import limits
from dcr_s3.format.cells import Cells


@dataclass(frozen=True)
class Region:
    """Cells ``start + sum(i[d] * strides[d])`` of tensor number ``tensor``, for all ``i`` in ``shape``, last dim
    fastest.

    ``start`` and ``strides`` count canonical cells. A whole tensor or a run of rows is one dim of stride 1.
    """

    tensor: int
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def run(cls, tensor: int, start: int, cells: int) -> Region:
        """``cells`` consecutive cells."""
        return cls(tensor, start, (cells,), (1,))

    @property
    def cells(self) -> int:
        return prod(self.shape)

    @property
    def is_run(self) -> bool:
        """True where the cells are consecutive, so that they can be a plain slice."""
        return len(self.shape) == 1 and (self.strides[0] == 1 or self.shape[0] <= 1)

    def check(self, tensor_cells: int) -> None:
        """Raises ValueError unless every cell lies inside a tensor of ``tensor_cells`` cells."""
        if not 1 <= len(self.shape) <= limits.REGION_DIMS or len(self.strides) != len(self.shape):
            raise ValueError(f"region of {len(self.shape)} dims")
        if any(n < 1 for n in self.shape) or any(s < 0 for s in self.strides):
            raise ValueError("region with an empty dim or a negative stride")
        last = self.start + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        if self.start < 0 or last >= tensor_cells:
            raise ValueError(f"region reaches cell {last} of a tensor with {tensor_cells}")

    def canonical(self, positions: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
        """Canonical cell indices (uint64) of positions counted inside this region."""
        if self.is_run:
            return positions.astype(np.uint64) + np.uint64(self.start)
        rest = positions.astype(np.uint64)
        index = np.full(rest.shape, self.start, np.uint64)
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            index += rest % np.uint64(extent) * np.uint64(stride)
            rest //= np.uint64(extent)
        return index

    def gather(self, cells: Cells) -> Cells:
        """The region's cells in order, flat: a slice of a tensor's flat ``cells`` for a run, else a copy."""
        if self.is_run:
            return cells[self.start : self.start + self.shape[0]]
        strides = tuple(s * cells.itemsize for s in self.strides)
        box = np.lib.stride_tricks.as_strided(cells[self.start :], self.shape, strides, writeable=False)
        return np.ascontiguousarray(box).reshape(-1)


_HEAD = struct.Struct("<IIQ")
MIN_REGION_BYTES = _HEAD.size + 16


def pack_regions(regions: Sequence[Region]) -> bytes:
    """Per region: tensor (u32), dims (u32), start (u64), then per dim its extent and stride (u64 each)."""
    parts: list[bytes] = []
    for r in regions:
        parts.append(_HEAD.pack(r.tensor, len(r.shape), r.start))
        parts.append(np.array([r.shape, r.strides], "<u8").T.tobytes())
    return b"".join(parts)


def unpack_regions(raw: bytes, at: int, count: int) -> tuple[tuple[Region, ...], int]:
    """Inverse of :func:`pack_regions` from offset ``at``; also returns where it ended.

    Raises ValueError if malformed.
    """
    if count * MIN_REGION_BYTES > len(raw) - at:
        raise ValueError(f"{count} regions do not fit")
    regions: list[Region] = []
    for _ in range(count):
        tensor, dims, start = _HEAD.unpack_from(raw, at)
        at += _HEAD.size
        if not 1 <= dims <= limits.REGION_DIMS or at + 16 * dims > len(raw):
            raise ValueError(f"region of {dims} dims")
        values = struct.unpack_from(f"<{2 * dims}Q", raw, at)
        at += 16 * dims
        if any(v > limits.TENSOR_CELLS for v in (start, *values)):
            raise ValueError("region over the limits")
        regions.append(Region(tensor, start, values[0::2], values[1::2]))
    return tuple(regions), at


def split_positions(
    regions: Sequence[Region], positions: npt.NDArray[np.uint32]
) -> Iterator[tuple[Region, slice, int]]:
    """Cuts ascending block ``positions`` by region: per region with any, the region, their slice, and its first
    position.
    """
    bounds = np.cumsum([0, *(r.cells for r in regions)])
    cuts = np.searchsorted(positions, bounds).tolist()
    for number, region in enumerate(regions):
        if cuts[number] < cuts[number + 1]:
            yield region, slice(cuts[number], cuts[number + 1]), int(bounds[number])
