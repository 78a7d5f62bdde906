"""The changed cells of a version, tensor by tensor, from the journals that hold them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dcr_s3.format.cells import Cells
from dcr_s3.format.region import split_positions
from dcr_s3.format.run import TensorSpec
from dcr_s3.targets.checkpoint import Checkpoint, match_checkpoint
from dcr_s3.targets.mirror import Mirror
from dcr_s3.targets.placement import Indices
from dcr_s3.targets.redo import Journal, RedoRecord, read_redo


@dataclass(frozen=True)
class Changed:
    """Ascending canonical ``positions`` (int64) of one tensor and the ``values`` (cells) they get; ``old``, where it is
    known, are those they have.
    """

    positions: Indices
    values: Cells
    old: Cells | None = None

    def over(self, cells: Cells) -> Cells:
        """A copy of all the tensor's cells, with the changes made."""
        result = cells.copy()
        result[self.positions] = self.values
        return result


def collect(records: Iterable[RedoRecord]) -> dict[int, Changed]:
    """Changes by tensor number; of a cell that is named twice the later value counts."""
    parts: dict[int, list[Changed]] = defaultdict(list)
    for record in records:
        for region, span, first in split_positions(record.regions, record.positions):
            index = region.canonical(record.positions[span] - np.uint32(first)).astype(np.int64)
            parts[region.tensor].append(Changed(index, record.values[span]))
    return {number: join_parts(found) for number, found in parts.items()}


def journal_changes(journals: Sequence[Journal], mirror: Mirror) -> dict[int, Changed]:
    """What closed journals of ``mirror`` would change in it."""
    states = [j for j in journals if j.path.is_dir()]
    if states:
        return dict(_differences(Checkpoint.open(states[-1].path), mirror))
    return collect(record for journal in journals for record in read_redo(journal.path))


def _differences(state: Checkpoint, mirror: Mirror) -> Iterator[tuple[int, Changed]]:
    specs: Sequence[TensorSpec] = mirror.specs
    for number, copies in enumerate(match_checkpoint(state, specs)):
        positions = np.flatnonzero(copies[0] != mirror.cells(number)).astype(np.int64)
        if positions.size:
            yield number, Changed(positions, copies[0][positions])


def join_parts(parts: Sequence[Changed]) -> Changed:
    """Changes of one tensor in order; of a cell that is named twice the later value counts."""
    positions = np.concatenate([p.positions for p in parts])
    values = np.concatenate([p.values for p in parts])
    known = [p.old for p in parts if p.old is not None]
    old = np.concatenate(known) if len(known) == len(parts) else None
    if positions.size > 1 and not bool((positions[1:] > positions[:-1]).all()):
        order = np.argsort(positions, kind="stable")
        order = order[np.append(np.diff(positions[order]) > 0, True)]
        positions, values = positions[order], values[order]
        old = old[order] if old is not None else None
    return Changed(positions, values, old)
