"""One owner's share of a mirror: the cells of its regions, in its own order, in RAM or in a mapped file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor

import numpy as np

from dcr_s3.delta import TensorKey, apply_changes, digest_at, digest_range
from dcr_s3.errors import BadInput
from dcr_s3.format.cells import Cells
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.region import Region
from dcr_s3.format.run import TensorSpec
from dcr_s3.protocol.position import Position
from dcr_s3.targets.files import SourceFile
from dcr_s3.targets.mirror import PassingMirror
from dcr_s3.targets.redo import RedoRecord
from dcr_s3.workers import bounded_map

_INDEX_CELLS = 1 << 20


class ShardMirror(PassingMirror):
    """Cells of ``pieces`` alone. ``digests`` are the sums over them.

    Every region that is asked for or applied is one of ``pieces``: this owner's own.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        position: Position,
        digests: Sequence[StateDigest],
        pieces: Mapping[Region, Cells],
    ) -> None:
        super().__init__(specs, position, digests)
        self._pieces = dict(pieces)
        self._held = [0] * len(self.specs)
        for region in self._pieces:
            self._held[region.tensor] += region.cells

    @property
    def size_bytes(self) -> int:
        """Bytes of all cells kept here."""
        return sum(cells.nbytes for cells in self._pieces.values())

    def copies(self, number: int) -> Sequence[Cells]:
        raise BadInput(f"tensor {self.specs[number].name}: only a share of it is kept here; publish pieces of shards")

    def held_cells(self, number: int) -> int:
        return self._held[number]

    def gather(self, region: Region) -> Cells:
        """Raises ``BadInput`` for a region that is no piece of this owner."""
        if region not in self._pieces:
            raise BadInput(
                f"tensor {self.specs[region.tensor].name}: this sender owns pieces of shards, and this is none of them"
            )
        return self._pieces[region]

    def overwrite(self, record: RedoRecord) -> None:
        apply_changes([self._pieces[r] for r in record.regions], record.positions, record.values)

    def files(self) -> list[SourceFile]:
        raise BadInput("one owner's share is no whole state; make the snapshot from a receiver's mirror")


def measure_pieces(
    pieces: Iterable[tuple[Region, Cells]], keys: Sequence[TensorKey], executor: Executor
) -> list[StateDigest]:
    """Per tensor, the sum over the pieces' cells; 0 where none is held. ``keys`` are by tensor number."""
    digests = [StateDigest()] * len(keys)

    def one(item: tuple[Region, Cells]) -> tuple[int, StateDigest]:
        region, cells = item
        key = keys[region.tensor]
        if region.is_run:
            return region.tensor, digest_range(key, region.start, cells)
        result = StateDigest()
        for start in range(0, region.cells, _INDEX_CELLS):
            positions = np.arange(start, min(start + _INDEX_CELLS, region.cells), dtype=np.uint32)
            result += digest_at(key, region.canonical(positions), cells[start : start + _INDEX_CELLS])
        return region.tensor, result

    for number, digest in bounded_map(executor, one, pieces, ahead=16):
        digests[number] += digest
    return digests
