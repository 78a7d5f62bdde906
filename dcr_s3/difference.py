"""Which tensors of two checkpoints differ, and by how much."""

from __future__ import annotations

import re
from concurrent.futures import Executor
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from dcr_s3.errors import BadInput
from dcr_s3.format.limits import BLOCK_DENSE_BYTES
from dcr_s3.targets.checkpoint import Checkpoint, describe
from dcr_s3.workers import Progress, bounded_map, make_executor, no_progress

_LAYER = re.compile(r"^(?P<head>.*?\b(?:layers?|blocks?|h))\.(?P<number>\d+)\.(?P<part>.+)$")


class TensorDifference(BaseModel):
    """One tensor. ``layer`` and ``part`` are set where its name follows ``...layers.N.part``."""

    name: str
    layer: int | None
    part: str
    elements: int
    changed_elements: int

    @property
    def ratio(self) -> float:
        """Share of elements that differ."""
        return self.changed_elements / max(self.elements, 1)


class Difference(BaseModel):
    """All tensors of two checkpoints that have the same names, dtypes and shapes."""

    a: str
    b: str
    changed_elements: int
    total_elements: int
    tensors: list[TensorDifference]


def compare(a: Path, b: Path, *, workers: int | None = None, progress: Progress | None = None) -> Difference:
    """Compares the stored bits of two checkpoint directories (or files): 0.0 and -0.0 differ, equal NaNs do not.

    Raises ``BadInput`` naming the tensors that only one of them has, or has in another dtype or shape.
    """
    report = progress or no_progress
    one, other = Checkpoint.open(a), Checkpoint.open(b)
    _require_same(one, other)
    jobs = [
        (name, start)
        for name, place in one.places.items()
        for start in range(0, max(place.cells, 1), BLOCK_DENSE_BYTES // place.dtype.cell_bytes)
    ]
    changed = dict.fromkeys(one.places, 0)
    total_bytes, done = sum(p.size_bytes for p in one.places.values()), 0

    def count(job: tuple[str, int]) -> tuple[str, int, int]:
        name, start = job
        end = start + BLOCK_DENSE_BYTES // one.places[name].dtype.cell_bytes
        piece = one.cells(name)[start:end]
        return name, int(np.count_nonzero(piece != other.cells(name)[start:end])), piece.nbytes

    executor: Executor
    with make_executor(workers, "diff") as executor:
        for name, found, size in bounded_map(executor, count, jobs, ahead=32):
            changed[name] += found
            done += size
            report("diff", done, total_bytes)
    tensors = [_difference(name, place.cells, changed[name]) for name, place in one.places.items()]
    return Difference(
        a=str(a),
        b=str(b),
        changed_elements=sum(changed.values()),
        total_elements=sum(t.elements for t in tensors),
        tensors=tensors,
    )


def _difference(name: str, elements: int, changed: int) -> TensorDifference:
    match = _LAYER.match(name)
    layer = int(match["number"]) if match else None
    part = match["part"] if match else name
    return TensorDifference(name=name, layer=layer, part=part, elements=elements, changed_elements=changed)


def _require_same(one: Checkpoint, other: Checkpoint) -> None:
    for mine, theirs in ((one, other), (other, one)):
        if missing := sorted(mine.places.keys() - theirs.places.keys()):
            raise BadInput(f"{theirs.directory}: lacks {describe(missing)}, which {mine.directory} has")
    for name, place in one.places.items():
        peer = other.places[name]
        if (place.dtype, place.shape) != (peer.dtype, peer.shape):
            raise BadInput(
                f"tensor {name}: {place.dtype.name} {list(place.shape)} in {one.directory}, "
                f"{peer.dtype.name} {list(peer.shape)} in {other.directory}"
            )
