"""Copies what lets receivers skip versions: folds, and a first snapshot, so that nobody crosses regions to start."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Executor

from dcr_s3.errors import CorruptObject, NotFound, PreconditionFailed
from dcr_s3.format import limits
from dcr_s3.format.fold import Fold
from dcr_s3.format.keys import FOLD_PREFIX, SNAPSHOT_PREFIX, fold_versions, snapshot_key, snapshot_version
from dcr_s3.format.run import Run
from dcr_s3.format.snapshot import Snapshot
from dcr_s3.relaying.copying import copy_object, holds
from dcr_s3.store.base import Store
from dcr_s3.workers import Progress, bounded_map

_AHEAD = 4


def copy_shortcuts(source: Store, targets: Sequence[Store], run: Run, executor: Executor, progress: Progress) -> None:
    """Copies the folds that a target lacks and, to a target without any snapshot, the source's newest one.

    Later snapshots are not copied: whoever holds a mirror in the target's region can make them there.
    """
    snapshots = {v: o.key for o in source.list(SNAPSHOT_PREFIX) if (v := snapshot_version(o.key)) is not None}
    if snapshots:
        empty = [t for t in targets if not any(snapshot_version(o.key) is not None for o in t.list(SNAPSHOT_PREFIX))]
        _copy(source, empty, run, snapshots[max(snapshots)], executor=executor, progress=progress)
    for key in [o.key for o in source.list(FOLD_PREFIX) if fold_versions(o.key) is not None]:
        _copy(source, [t for t in targets if not _has(t, key)], run, key, executor=executor, progress=progress)


def _has(store: Store, key: str) -> bool:
    try:
        store.head(key)
    except NotFound:
        return False
    return True


def _copy(
    source: Store, targets: Sequence[Store], run: Run, key: str, *, executor: Executor, progress: Progress
) -> None:
    """Copies a document after the objects that it names."""
    if not targets:
        return
    try:
        found = source.get(key, limit_bytes=limits.MANIFEST_BYTES)
    except NotFound:
        return  # deleted since it was listed
    assert found is not None
    where = f"{source.url}/{key}"
    document = (
        Fold.from_bytes(found.body, where=where) if fold_versions(key) else Snapshot.from_bytes(found.body, where=where)
    )
    if document.run_id != run.run_id:
        raise CorruptObject(f"{where}: belongs to run {document.run_id}, not to {run.run_id}")
    named = list(_named(document))
    size, done = sum(size_bytes for _, size_bytes, _ in named), 0

    def one(entry: tuple[str, int, str]) -> int:
        name, size_bytes, digest = entry
        copy_object(source, [t for t in targets if not holds(t, name, size_bytes)], name, size_bytes, digest)
        return size_bytes

    for copied in bounded_map(executor, one, named, ahead=_AHEAD):
        done += copied
        progress(key.partition("/")[0], done, size)
    for target in targets:
        try:
            target.put(key, bytearray(found.body), if_absent=True)
        except PreconditionFailed:
            pass  # another relay was faster


def _named(document: Fold | Snapshot) -> Iterable[tuple[str, int, str]]:
    """Key, size in bytes and SHA-256 of every object that a document names."""
    if isinstance(document, Fold):
        return [(document.key(s), s.size_bytes, s.sha256) for s in document.segments]
    return [(snapshot_key(document.version, document.folder, f.name), f.size_bytes, f.sha256) for f in document.files]
