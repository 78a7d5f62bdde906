"""Gets a mirror directory ready: opens it, adopts a checkpoint in place, copies a base, or downloads a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from hashlib import sha256
from pathlib import Path

from dcr_s3.delta import tensor_key
from dcr_s3.errors import BadInput, CorruptObject, NotFound
from dcr_s3.format import limits
from dcr_s3.format.cells import Cells
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.keys import SNAPSHOT_MARKER, snapshot_key
from dcr_s3.format.run import Run
from dcr_s3.format.snapshot import Snapshot, SnapshotFile
from dcr_s3.protocol.position import Position
from dcr_s3.reading import fetch_manifest
from dcr_s3.replay import RANGE_BYTES
from dcr_s3.store.base import Store
from dcr_s3.targets.checkpoint import Checkpoint
from dcr_s3.targets.copy import copy_checkpoint
from dcr_s3.targets.directory import DirectoryMirror, acquire, match_checkpoint
from dcr_s3.targets.disk import disk_errors
from dcr_s3.targets.mirror import describe, measure, total
from dcr_s3.targets.state import STATE_FILE, WORK_DIR
from dcr_s3.workers import Progress, no_progress
from dcr_s3.world import world

_FILLING = "filling"


def open_mirror(
    store: Store,
    run: Run,
    start: Position,
    directory: Path,
    *,
    base: Path | None,
    executor: Executor,
    progress: Progress = no_progress,
) -> DirectoryMirror:
    """The mirror in ``directory``, made first if need be; ``start`` is the run's version 0.

    A directory that already holds a checkpoint is adopted in place if its bits are those of some version; an empty one
    is filled from ``base`` or else from the run's snapshot. Raises ``BadInput`` saying which tensors are not the run's.
    """
    if (directory / STATE_FILE).exists():
        return DirectoryMirror.open(directory, run)
    lock = acquire(directory)
    try:
        filling = directory / WORK_DIR / _FILLING
        if filling.exists() or not any(directory.glob("*.safetensors")):
            filling.touch()
            # A power loss must not forget that the copy is unfinished, nor keep a name without its bytes.
            world().sync_directory(filling.parent)
            world().sync_directory(directory)
            if base is not None:
                copy_checkpoint(Checkpoint.open(base), directory, progress)
            else:
                download_snapshot(store, run, directory, progress)
            world().unlink(filling)
        cells = [copies[0] for copies in match_checkpoint(Checkpoint.open(directory), run.tensors)]
        digests = measure_run(run, cells, executor, progress)
        position = locate(store, run, start, digests, what=str(directory))
        return DirectoryMirror.adopt(directory, run, position, digests, lock)
    except BaseException:
        lock.release()
        raise


def check_base(run: Run, start: Position, store: Store, base: Path, executor: Executor, progress: Progress) -> None:
    """Raises ``BadInput`` unless a checkpoint directory holds the bits of some version of the run."""
    cells = [copies[0] for copies in match_checkpoint(Checkpoint.open(base), run.tensors)]
    locate(store, run, start, measure_run(run, cells, executor, progress), what=str(base))


def measure_run(run: Run, cells: Sequence[Cells], executor: Executor, progress: Progress) -> list[StateDigest]:
    """Digest of every tensor of the run, from ``cells`` in the run's order."""
    return measure(cells, [tensor_key(t.name, t.type, t.shape) for t in run.tensors], executor, progress=progress)


def locate(store: Store, run: Run, start: Position, digests: Sequence[StateDigest], *, what: str) -> Position:
    """The newest version whose state has these digests.

    Raises ``BadInput`` naming the tensors that differ from version 0.
    """
    state = total(digests).hex()
    position, found = start, None
    while True:
        if position.state == state:
            found = position
        following = fetch_manifest(store, position)
        if following is None:
            break
        position = following[1]
    if found is not None:
        return found
    wrong = [t.name for t, d in zip(run.tensors, digests, strict=True) if t.digest != d.hex()]
    raise BadInput(
        f"{what}: its bits are of no version of the run {store.url} (0 to {position.version}): "
        f"{describe(wrong)} differ from version 0; use the checkpoint the run was created from"
    )


def download_snapshot(store: Store, run: Run, directory: Path, progress: Progress = no_progress) -> None:
    """Fills a directory with the run's snapshot of version 0. Raises ``BadInput`` if there is none."""
    marker = snapshot_key(0, SNAPSHOT_MARKER)
    try:
        found = store.get(marker, limit_bytes=limits.MANIFEST_BYTES)
    except NotFound:
        raise BadInput(
            f"{directory}: holds no checkpoint, and {store.url} has no snapshot: give the base with --base, "
            "or create the run with --upload-base"
        ) from None
    assert found is not None
    snapshot = Snapshot.from_bytes(found.body, where=marker)
    if snapshot.run_id != run.run_id:
        raise CorruptObject(f"{marker}: belongs to run {snapshot.run_id}, not to {run.run_id}")
    size = sum(f.size_bytes for f in snapshot.files)
    done = 0
    for file in snapshot.files:
        _download(store, file, directory, done, size, progress)
        done += file.size_bytes
    world().sync_directory(directory)


def _download(store: Store, file: SnapshotFile, directory: Path, done: int, size: int, progress: Progress) -> None:
    key = snapshot_key(0, file.name)
    digest = sha256()
    buffer = memoryview(bytearray(min(RANGE_BYTES, file.size_bytes)))
    with disk_errors(directory), (directory / file.name).open("wb") as handle:
        for start in range(0, file.size_bytes, RANGE_BYTES):
            part = buffer[: min(RANGE_BYTES, file.size_bytes - start)]
            store.read_into(key, start, part)
            digest.update(part)
            handle.write(part)
            progress("download", done + start + len(part), size)
        world().sync(handle)
    if digest.hexdigest() != file.sha256:
        raise CorruptObject(f"{key}: its bytes do not have the digest that {snapshot_key(0, SNAPSHOT_MARKER)} names")
