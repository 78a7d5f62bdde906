"""Copies full states, so that a new receiver needs nothing but its own region."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

from dcr_s3.errors import CorruptObject, NotFound, PreconditionFailed
from dcr_s3.format import limits
from dcr_s3.format.keys import SNAPSHOT_MARKER, SNAPSHOT_PREFIX
from dcr_s3.format.run import Run
from dcr_s3.format.snapshot import Snapshot
from dcr_s3.relaying.copying import copy_object, holds
from dcr_s3.store.base import Store
from dcr_s3.workers import Progress, bounded_map


def copy_snapshots(
    source: Store, targets: Sequence[Store], run: Run, executor: Executor, progress: Progress, *, ahead: int = 4
) -> None:
    """Copies every complete snapshot of the source that a target lacks: its files, then its marker."""
    present = [{o.key for o in t.list(SNAPSHOT_PREFIX) if o.key.endswith(f"/{SNAPSHOT_MARKER}")} for t in targets]
    for marker in [o.key for o in source.list(SNAPSHOT_PREFIX) if o.key.endswith(f"/{SNAPSHOT_MARKER}")]:
        missing = [t for t, markers in zip(targets, present, strict=True) if marker not in markers]
        if missing:
            _copy_snapshot(source, missing, run, marker, executor, progress, ahead)


def _copy_snapshot(
    source: Store, targets: Sequence[Store], run: Run, marker: str, executor: Executor, progress: Progress, ahead: int
) -> None:
    try:
        found = source.get(marker, limit_bytes=limits.MANIFEST_BYTES)
    except NotFound:
        return  # deleted since it was listed
    assert found is not None
    snapshot = Snapshot.from_bytes(found.body, where=f"{source.url}/{marker}")
    if snapshot.run_id != run.run_id:
        raise CorruptObject(f"{source.url}/{marker}: belongs to run {snapshot.run_id}, not to {run.run_id}")
    size, done = sum(f.size_bytes for f in snapshot.files), 0

    def one(number: int) -> int:
        file = snapshot.files[number]
        key = snapshot.key(file)
        missing = [t for t in targets if not holds(t, key, file.size_bytes)]
        copy_object(source, missing, key, file.size_bytes, file.sha256)
        return file.size_bytes

    for copied in bounded_map(executor, one, range(len(snapshot.files)), ahead=ahead):
        done += copied
        progress("snapshot", done, size)
    for target in targets:
        try:
            target.put(marker, bytearray(found.body), if_absent=True)
        except PreconditionFailed:
            pass  # another relay was faster
