"""What an engine holds, read back through its placement: cells and state digests."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dcr_s3.delta import TensorKey, digest_at, digest_range
from dcr_s3.format.cells import Cells
from dcr_s3.format.digest import StateDigest
from dcr_s3.targets.placement import Block
from dcr_s3.targets.storages import Storages, host

_CHUNK_CELLS = 1 << 20


def block_cells(storages: Storages, block: Block) -> Cells:
    """The engine's cells of a block, flat, in the block's canonical order."""
    view = storages.items[block.storage].view(block.start, block.region.shape, block.strides)
    return host(view.reshape(-1))


def block_digest(storages: Storages, key: TensorKey, block: Block) -> StateDigest:
    """Digest of a block's cells at their canonical places."""
    cells = block_cells(storages, block)
    if block.region.is_run:
        return digest_range(key, block.region.start, cells)
    result = StateDigest()
    for start in range(0, cells.size, _CHUNK_CELLS):
        positions = np.arange(start, min(start + _CHUNK_CELLS, cells.size), dtype=np.uint32)
        result += digest_at(key, block.region.canonical(positions), cells[start : start + positions.size])
    return result


def tensor_digest(storages: Storages, key: TensorKey, blocks: Iterable[Block]) -> StateDigest:
    """Digest of all cells of a tensor that the engine holds."""
    result = StateDigest()
    for block in blocks:
        result += block_digest(storages, key, block)
    return result
