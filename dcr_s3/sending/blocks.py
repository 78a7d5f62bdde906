"""Groups the cells of arriving tensors into blocks: frames span tensors, so small ones cost nothing extra."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dcr_s3.format.cells import Cells
from dcr_s3.format.dtypes import Dtype
from dcr_s3.format.limits import BLOCK_DENSE_BYTES
from dcr_s3.format.region import Region


@dataclass
class Block:
    """Regions of one dtype and their new cells, piece by piece."""

    dtype: Dtype
    regions: list[Region] = field(default_factory=list)
    new: list[Cells] = field(default_factory=list)
    size_bytes: int = 0


class BlockBuilder:
    """One open block per dtype."""

    def __init__(self, limit_bytes: int = BLOCK_DENSE_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._open: dict[str, Block] = {}

    def add(self, dtype: Dtype, region: Region, cells: Cells) -> Iterator[Block]:
        """Takes one piece of at most ``limit_bytes``; yields a block that is full."""
        block = self._open.get(dtype.name)
        if block is not None and block.size_bytes + cells.nbytes > self.limit_bytes:
            yield self._open.pop(dtype.name)
            block = None
        if block is None:
            block = self._open[dtype.name] = Block(dtype)
        block.regions.append(region)
        block.new.append(cells)
        block.size_bytes += cells.nbytes
        if block.size_bytes == self.limit_bytes:
            yield self._open.pop(dtype.name)

    def flush(self) -> Iterator[Block]:
        """Yields what is open."""
        while self._open:
            yield self._open.pop(next(iter(self._open)))
