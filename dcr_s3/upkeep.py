"""Keeps catching up cheap: a fold or a snapshot from a mirror directory, always or only once it is worth it.

For anyone with a mirror and permission to write, beside the sender or from a timer.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from dcr_s3.catalogue import read_catalogue
from dcr_s3.folding import Folder
from dcr_s3.format.run import Run
from dcr_s3.format.signature import Signer
from dcr_s3.mirroring import open_mirror
from dcr_s3.protocol.plan import beyond_snapshot_bytes, chain_bytes
from dcr_s3.protocol.position import Position
from dcr_s3.reading import load_run
from dcr_s3.snapshots import find_snapshot, publish_snapshot
from dcr_s3.store import Store, open_store
from dcr_s3.targets.directory import DirectoryMirror
from dcr_s3.workers import Progress, make_executor, no_progress

SNAPSHOT_SHARE = 0.5
FOLD_SHARE = 0.05


class SnapshotReport(BaseModel):
    """``made`` is False where the version has a snapshot already or it was not worth one. ``beyond_bytes`` is what a
    new receiver fetched before to get to this version beside its snapshot, None if there was no way.
    """

    version: int
    made: bool
    size_bytes: int = 0
    beyond_bytes: int | None
    dense_bytes: int


class FoldReport(BaseModel):
    """``made`` is False where there was nothing to fold or it was not worth it. ``chain_bytes`` is what the folded
    versions take one by one.
    """

    first: int
    last: int
    made: bool
    changed_elements: int = 0
    fold_bytes: int = 0
    chain_bytes: int
    dense_bytes: int


@dataclass(frozen=True)
class _Bench:
    store: Store
    run: Run
    start: Position
    mirror: DirectoryMirror
    executor: Executor


def make_snapshot(
    url: str | Store,
    directory: Path | str,
    *,
    if_worth: float | None = None,
    signer: Signer | None = None,
    workers: int | None = None,
    progress: Progress = no_progress,
) -> SnapshotReport:
    """Publishes the version that a mirror directory holds as a full state, after proving all of its bits.

    With ``if_worth`` only if a new receiver would otherwise fetch more than this share of a full copy beside its
    snapshot. Raises ``BadInput`` if the directory is no mirror of the run, ``StateMismatch``, ``Busy``.
    """
    with _bench(url, Path(directory), None, signer, workers) as bench:
        version = bench.mirror.position.version
        catalogue = read_catalogue(bench.store, bench.start, None, bench.executor)
        beyond = beyond_snapshot_bytes(catalogue.edges, version)
        worth = if_worth is None or beyond is None or beyond > if_worth * bench.run.dense_bytes
        made = worth and find_snapshot(bench.store, bench.run.run_id, version) is None
        size = publish_snapshot(bench.store, bench.mirror, bench.executor, progress).size_bytes if made else 0
        return SnapshotReport(
            version=version, made=made, size_bytes=size, beyond_bytes=beyond, dense_bytes=bench.run.dense_bytes
        )


def make_fold(
    url: str | Store,
    directory: Path | str,
    *,
    base: Path | str | None = None,
    to_version: int | None = None,
    if_worth: float | None = None,
    signer: Signer | None = None,
    workers: int | None = None,
    progress: Progress = no_progress,
) -> FoldReport:
    """Brings a mirror directory to the newest version (or ``to_version``) and publishes all that changed as one fold.

    With ``if_worth`` nothing happens, and the mirror stays where it is, until the versions in between take more than
    this share of a full copy. A directory that is no mirror yet is made from ``base`` or a snapshot. Raises
    ``BadInput``, ``ChainBroken`` if a version in between was deleted, ``Busy``.
    """
    with _bench(url, Path(directory), Path(base) if base is not None else None, signer, workers) as bench:
        held = bench.mirror.position
        catalogue = read_catalogue(bench.store, bench.start, held, bench.executor)
        last = catalogue.newest if to_version is None else to_version
        between = chain_bytes(catalogue.edges, held.version, last)
        worth = if_worth is None or between > if_worth * bench.run.dense_bytes
        folder = Folder(
            bench.store, bench.run, bench.start, bench.mirror,
            coders=bench.executor, movers=bench.executor, progress=progress,
        )  # fmt: skip
        fold = folder.fold(to_version=last) if worth and last > held.version else None
        bench.mirror.flush()
        return FoldReport(
            first=held.version,
            last=bench.mirror.position.version,
            made=fold is not None,
            changed_elements=fold.statistics.changed_elements if fold is not None else 0,
            fold_bytes=fold.statistics.segment_bytes if fold is not None else 0,
            chain_bytes=between,
            dense_bytes=bench.run.dense_bytes,
        )


@contextmanager
def _bench(
    url: str | Store, directory: Path, base: Path | None, signer: Signer | None, workers: int | None
) -> Iterator[_Bench]:
    with ExitStack() as stack:
        store = open_store(url, signer=signer)
        if isinstance(url, str):
            stack.callback(store.close)
        run, start = load_run(store)
        executor = stack.enter_context(make_executor(workers, "upkeep"))
        mirror = open_mirror(store, run, start, directory, base=base, executor=executor)
        stack.callback(mirror.close)
        yield _Bench(store, run, start, mirror, executor)
