"""Creates a run: the table of canonical tensors and the digest of version 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcr_s3.delta import tensor_key
from dcr_s3.errors import BadInput, PreconditionFailed, RunExists, RunMissing
from dcr_s3.format.cells import Cells
from dcr_s3.format.dtypes import Dtype
from dcr_s3.format.keys import RUN_KEY
from dcr_s3.format.run import Run, TensorSpec
from dcr_s3.mapping.cells import describe_tensor, host_cells, same_storage
from dcr_s3.protocol.position import Position
from dcr_s3.reading import load_run
from dcr_s3.store.base import Store
from dcr_s3.targets.checkpoint import Checkpoint, describe
from dcr_s3.targets.mirror import measure, total
from dcr_s3.workers import Progress
from dcr_s3.world import timestamp, world

Base = Path | Mapping[str, Any]


@dataclass(frozen=True)
class BaseTensor:
    """One canonical tensor of a base, before its digest is known."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    aliases: tuple[str, ...]
    cells: Cells


def read_base(base: Base) -> list[BaseTensor]:
    """The canonical tensors of a checkpoint directory (in the files' order) or of a state dict (tied names
    resolved).
    """
    if not isinstance(base, Mapping):
        checkpoint = Checkpoint.open(base)
        return [BaseTensor(p.name, p.dtype, p.shape, (), checkpoint.cells(p.name)) for p in checkpoint.places.values()]
    firsts: list[str] = []
    aliases: dict[str, list[str]] = {}
    by_pointer: dict[int, list[str]] = {}
    for name, tensor in base.items():
        describe_tensor(name, tensor)
        peers = by_pointer.setdefault(tensor.data_ptr(), [])
        first = next((p for p in peers if same_storage(base[p], tensor)), None)
        if first is None:
            peers.append(name)
            firsts.append(name)
        else:
            aliases.setdefault(first, []).append(name)
    return [
        BaseTensor(name, *describe_tensor(name, base[name]), tuple(aliases.get(name, ())), host_cells(base[name]))
        for name in firsts
    ]


def create_run(
    store: Store, tensors: Sequence[BaseTensor], *, context: bool, executor: Executor, progress: Progress
) -> tuple[Run, Position]:
    """Creates `run.json`, or finds that the same base is there already. Raises ``RunExists`` if another one is."""
    if not tensors:
        raise BadInput("the base holds no tensors")
    keys = [tensor_key(t.name, t.dtype, t.shape) for t in tensors]
    digests = measure([t.cells for t in tensors], keys, executor, stage="digest", progress=progress)
    run = Run(
        run_id=world().token(16),
        created_at=timestamp("seconds"),
        coding="context" if context else "context-free",
        state=total(digests).hex(),
        tensors=tuple(
            TensorSpec(name=t.name, dtype=t.dtype.name, shape=t.shape, digest=d.hex(), aliases=t.aliases)
            for t, d in zip(tensors, digests, strict=True)
        ),
    )
    try:
        existing, start = load_run(store)
    except RunMissing:
        try:
            store.put(RUN_KEY, run.to_bytes(), if_absent=True)
        except PreconditionFailed:
            pass
        existing, start = load_run(store)
    if existing.run_id != run.run_id:
        _check_same(store, existing, run)
    return existing, start


def _check_same(store: Store, existing: Run, wanted: Run) -> None:
    here = {t.name: t for t in existing.tensors}
    mine = {t.name: t for t in wanted.tensors}
    differing = sorted(n for n in here.keys() | mine.keys() if here.get(n) != mine.get(n))
    if differing:
        raise RunExists(
            f"{store.url}: holds run {existing.run_id} with another base ({describe(differing)} differ); "
            "use another address, or the base it was created from"
        )
    if existing.coding != wanted.coding:
        raise RunExists(f"{store.url}: holds run {existing.run_id} with coding {existing.coding}; use another address")
