"""Groups the cells of arriving tensors into blocks, and codes them: frames span tensors, so small ones cost nothing
extra.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dcr_s3.delta import TensorKey, encode_block
from dcr_s3.delta.account import TensorChange, account, totals
from dcr_s3.format.cells import Cells
from dcr_s3.format.dtypes import Dtype
from dcr_s3.format.limits import BLOCK_DENSE_BYTES
from dcr_s3.format.region import Region
from dcr_s3.format.segment import BlockEntry


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


class Coded(NamedTuple):
    """A block that has changes. ``entry.offset`` is 0; ``positions`` (uint32) count along the regions, ``new`` are the
    bits there.
    """

    entry: BlockEntry
    payload: bytes
    changes: tuple[TensorChange, ...]
    positions: npt.NDArray[np.uint32]
    new: Cells


def encode(block: Block, old: Sequence[Cells], keys: Sequence[TensorKey], *, context: bool) -> Coded | None:
    """Compares a block with the cells before, in the same regions, and codes the changes; None if there are none.

    ``keys`` are by tensor number. With ``context`` the old cells are needed to read it.
    """
    coded = encode_block(block.dtype, old, block.new, context=context)
    changed = len(coded.changes.positions)
    if not changed:
        return None
    regions = tuple(block.regions)
    changes = tuple(account(regions, coded.changes, keys))
    entry = BlockEntry(
        offset=0,
        size_bytes=len(coded.payload),
        coding=coded.coding,
        dtype=block.dtype,
        cells=sum(r.cells for r in regions),
        changed=changed,
        sha256=sha256(coded.payload).digest(),
        old=totals(changes)[0],
        new=totals(changes)[1],
        regions=regions,
    )
    return Coded(entry, coded.payload, changes, coded.changes.positions, coded.changes.new)
