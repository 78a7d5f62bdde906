"""Gets a mirror directory ready: opens it, adopts a checkpoint in place, copies a base, or downloads a snapshot."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path

from dcr_s3.catalogue import read_catalogue
from dcr_s3.delta import tensor_key
from dcr_s3.errors import BadInput, ChainBroken, Forbidden
from dcr_s3.format.cells import Cells
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.keys import MANIFEST_PREFIX, manifest_version
from dcr_s3.format.run import Run
from dcr_s3.protocol.plan import cheapest
from dcr_s3.protocol.position import Position
from dcr_s3.reading import fetch_manifest, read_position
from dcr_s3.snapshots import download_snapshot
from dcr_s3.store.base import Store
from dcr_s3.targets.checkpoint import Checkpoint, describe, match_checkpoint
from dcr_s3.targets.copy import copy_checkpoint
from dcr_s3.targets.directory import DirectoryMirror, acquire
from dcr_s3.targets.mirror import measure, total
from dcr_s3.targets.state import STATE_FILE, WORK_DIR
from dcr_s3.ways import PLANS
from dcr_s3.workers import Progress, no_progress
from dcr_s3.world import world

log = logging.getLogger(__name__)

_FILLING = "filling"


def open_mirror(
    store: Store,
    run: Run,
    start: Position,
    directory: Path,
    *,
    base: Path | None,
    executor: Executor,
    to_version: int | None = None,
    progress: Progress = no_progress,
) -> DirectoryMirror:
    """The mirror in ``directory``, made first if need be; ``start`` is the run's version 0.

    A directory that already holds a checkpoint is adopted in place if its bits are those of some version; an empty one
    is filled from ``base``, or else from the snapshot that is the cheapest way to the newest version (or to
    ``to_version``). Raises ``BadInput`` saying which tensors are not the run's, ``ChainBroken``.
    """
    if (directory / STATE_FILE).exists():
        return DirectoryMirror.open(directory, run)
    lock = acquire(directory)
    try:
        filling = directory / WORK_DIR / _FILLING
        claimed: Position | None = None
        if filling.exists() or not any(directory.glob("*.safetensors")):
            filling.touch()
            # A power loss must not forget that the copy is unfinished, nor keep a name without its bytes.
            world().sync_directory(filling.parent)
            world().sync_directory(directory)
            if base is not None:
                claimed = _fill_from_base(run, base, directory, progress)
            else:
                claimed = _fill_from_snapshot(store, start, directory, to_version, executor, progress)
        cells = [copies[0] for copies in match_checkpoint(Checkpoint.open(directory), run.tensors)]
        digests = measure_run(run, cells, executor, progress)
        position = locate(store, run, start, digests, what=str(directory), claimed=claimed)
        # Only now: a directory filled from a wrong base is filled again by the next try.
        if filling.exists():
            world().unlink(filling)
        return DirectoryMirror.adopt(directory, run, position, digests, lock)
    except BaseException:
        lock.release()
        raise


def _fill_from_base(run: Run, base: Path, directory: Path, progress: Progress) -> Position | None:
    """Copies a checkpoint directory; returns what it claims to be if it is a mirror, which stays locked meanwhile."""
    if not (base / STATE_FILE).exists():
        copy_checkpoint(Checkpoint.open(base), directory, progress)
        return None
    mirror = DirectoryMirror.open(base, run)
    try:
        copy_checkpoint(Checkpoint.open(base), directory, progress)
        return mirror.position
    finally:
        mirror.close()


def _fill_from_snapshot(
    store: Store, start: Position, directory: Path, to_version: int | None, executor: Executor, progress: Progress
) -> Position:
    for _ in range(PLANS):
        catalogue = read_catalogue(store, start, None, executor)
        wanted = catalogue.newest if to_version is None else min(to_version, catalogue.newest)
        path = cheapest(catalogue.edges, None, wanted)
        if path is None and not catalogue.snapshots:
            raise BadInput(
                f"{directory}: holds no checkpoint, and {store.url} has no snapshot: give the base with --base, "
                "or create the run with --upload-base"
            )
        if path is None:
            raise ChainBroken(
                f"{store.url}: no way leads from a snapshot to version {wanted}; give the base with --base"
            )
        snapshot = catalogue.snapshots[path[0].last]
        for file in directory.glob("*.safetensors"):
            if file.name not in {f.name for f in snapshot.files}:
                world().unlink(file)
        try:
            download_snapshot(store, snapshot, directory, executor, progress)
            return catalogue.positions[snapshot.version]
        except ChainBroken as error:
            log.info("%s; looking for another snapshot", error)
    raise ChainBroken(f"{store.url}: snapshots disappear faster than they are read")


def check_base(run: Run, start: Position, store: Store, base: Path, executor: Executor, progress: Progress) -> None:
    """Raises ``BadInput`` unless a checkpoint directory holds the bits of some version of the run."""
    cells = [copies[0] for copies in match_checkpoint(Checkpoint.open(base), run.tensors)]
    locate(store, run, start, measure_run(run, cells, executor, progress), what=str(base))


def measure_run(run: Run, cells: Sequence[Cells], executor: Executor, progress: Progress) -> list[StateDigest]:
    """Digest of every tensor of the run, from ``cells`` in the run's order."""
    return measure(cells, [tensor_key(t.name, t.type, t.shape) for t in run.tensors], executor, progress=progress)


def locate(
    store: Store,
    run: Run,
    start: Position,
    digests: Sequence[StateDigest],
    *,
    what: str,
    claimed: Position | None = None,
) -> Position:
    """A version whose state has these digests: ``claimed``, version 0, or else the newest one.

    Raises ``BadInput`` naming the tensors that differ from version 0.
    """
    state = total(digests).hex()
    if claimed is not None and claimed.state == state:
        there = read_position(store, start, claimed.version)
        if there.sha256 == claimed.sha256:
            return claimed
    if start.state == state:
        return start
    newest = 0
    for position in _positions(store, start):
        newest = max(newest, position.version)
        if position.state == state:
            return position
    wrong = [t.name for t, d in zip(run.tensors, digests, strict=True) if t.digest != d.hex()]
    raise BadInput(
        f"{what}: its bits are of no version of the run {store.url} (0 to {newest}): "
        f"{describe(wrong)} differ from version 0; use the checkpoint the run was created from"
    )


def _positions(store: Store, start: Position) -> Iterator[Position]:
    """All versions but 0, newest first; oldest first where listing is not allowed."""
    try:
        versions = [v for v in (manifest_version(o.key) for o in store.list(MANIFEST_PREFIX)) if v is not None]
    except Forbidden:
        following = fetch_manifest(store, start)
        while following is not None:
            yield following[1]
            following = fetch_manifest(store, following[1])
        return
    for version in sorted(versions, reverse=True):
        yield read_position(store, start, version)
