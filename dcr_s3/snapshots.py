"""Full states in the bucket: ordinary checkpoint directories, complete once their marker exists."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from hashlib import file_digest, sha256
from itertools import chain
from pathlib import Path

from dcr_s3.delta import tensor_key
from dcr_s3.errors import BadInput, CorruptObject, NotFound, ObjectGone, PreconditionFailed, StoreUnavailable
from dcr_s3.format import limits
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.keys import snapshot_key, snapshot_marker_key
from dcr_s3.format.run import TensorSpec
from dcr_s3.format.snapshot import Snapshot, SnapshotFile
from dcr_s3.protocol.position import Position
from dcr_s3.store.base import Store
from dcr_s3.targets.checkpoint import Checkpoint, match_checkpoint
from dcr_s3.targets.disk import disk_errors
from dcr_s3.targets.files import SourceFile
from dcr_s3.targets.mirror import Mirror, measure, total, verify_mirror
from dcr_s3.workers import Progress, bounded_map, no_progress
from dcr_s3.world import world

log = logging.getLogger(__name__)

RANGE_BYTES = 8 << 20
FETCH_AHEAD = 8
UPLOAD_AHEAD = 4

ProgressOfFile = Callable[[int], None]


def publish_snapshot(store: Store, mirror: Mirror, executor: Executor, progress: Progress = no_progress) -> Snapshot:
    """Puts a mirror's state into the bucket, after proving all of its bits; returns the snapshot that is there then.

    Does nothing if the version has one. Raises ``StateMismatch`` if the mirror does not hold what it claims.
    """
    existing = find_snapshot(store, mirror.position.run_id, mirror.position.version)
    if existing is not None:
        return existing
    verify_mirror(mirror, executor, progress)
    return upload_snapshot(store, mirror.position, mirror.files(), executor, progress)


def find_snapshot(store: Store, run_id: str, version: int) -> Snapshot | None:
    """A version's snapshot, None if it has none. Raises ``CorruptObject`` for a marker of another run or version."""
    key = snapshot_marker_key(version)
    try:
        found = store.get(key, limit_bytes=limits.MANIFEST_BYTES)
    except NotFound:
        return None
    assert found is not None
    snapshot = Snapshot.from_bytes(found.body, where=f"{store.url}/{key}")
    if snapshot.run_id != run_id or snapshot.version != version:
        raise CorruptObject(
            f"{store.url}/{key}: is of run {snapshot.run_id}, version {snapshot.version}, not of {run_id}, {version}"
        )
    return snapshot


def upload_snapshot(
    store: Store,
    position: Position,
    files: Sequence[SourceFile],
    executor: Executor,
    progress: Progress = no_progress,
) -> Snapshot:
    """Puts files, proved to be the state of ``position``, into a folder of their own, then the marker.

    Interrupted, it leaves objects that nobody reads. If another writer was faster its snapshot is returned, and this
    one's files are deleted.
    """
    folder = world().token(6)
    size = sum(f.size_bytes for f in files)
    entries: list[SnapshotFile] = []
    done = 0
    for file in files:
        key = snapshot_key(position.version, folder, file.name)
        entries.append(_upload(store, key, file, executor, partial(_report, progress, "upload", done, size)))
        done += entries[-1].size_bytes
    snapshot = Snapshot(
        run_id=position.run_id,
        version=position.version,
        sha256=position.sha256,
        state=position.state,
        step=position.step,
        folder=folder,
        files=tuple(entries),
    )
    return _mark(store, snapshot)


def _report(progress: Progress, stage: str, before: int, size: int, done: int) -> None:
    progress(stage, before + done, size)


def _upload(store: Store, key: str, file: SourceFile, executor: Executor, progress: ProgressOfFile) -> SnapshotFile:
    """Puts one file, in parts if it is large; reads and digests on while parts are on their way."""
    digest = sha256()
    size = 0
    pieces = file.read()
    first = next(pieces, bytearray())
    if len(first) == file.size_bytes:
        store.put(key, first)
        progress(len(first))
        return SnapshotFile(name=file.name, size_bytes=len(first), sha256=sha256(first).hexdigest())

    def parts() -> Iterator[tuple[int, bytearray]]:
        for number, body in enumerate(chain([first], pieces), 1):
            digest.update(body)
            yield number, body

    upload = store.open_multipart(key)

    def send(part: tuple[int, bytearray]) -> int:
        upload.upload_part(*part)
        return len(part[1])

    try:
        for sent in bounded_map(executor, send, parts(), ahead=UPLOAD_AHEAD):
            size += sent
            progress(size)
        upload.complete()
    except BaseException:
        upload.abort()
        raise
    return SnapshotFile(name=file.name, size_bytes=size, sha256=digest.hexdigest())


def _mark(store: Store, snapshot: Snapshot) -> Snapshot:
    """Creates the marker, or finds another writer's; what lies under the key decides."""
    key = snapshot_marker_key(snapshot.version)
    lost: StoreUnavailable | None = None
    try:
        store.put(key, bytearray(snapshot.to_bytes()), if_absent=True)
        return snapshot
    except PreconditionFailed:
        pass
    except StoreUnavailable as error:
        lost = error
    found = find_snapshot(store, snapshot.run_id, snapshot.version)
    if found is None:
        raise lost or StoreUnavailable(f"{store.url}/{key}: the store refuses to create it, but it is not there")
    if found.folder != snapshot.folder:
        log.info("%s/%s: another writer was faster", store.url, key)
        store.delete([snapshot.key(f) for f in snapshot.files])
    return found


def download_snapshot(
    store: Store, snapshot: Snapshot, directory: Path, fetchers: Executor, progress: Progress = no_progress
) -> None:
    """Fills a directory with a snapshot's files; those that are there already, bit for bit, are kept.

    Raises ``ObjectGone`` if a file is gone, ``CorruptObject`` if it has other bytes than the marker names.
    """
    directory.mkdir(parents=True, exist_ok=True)
    done = 0
    for file in snapshot.files:
        if not _is_there(directory / file.name, file):
            report = partial(_report, progress, "download", done, snapshot.size_bytes)
            download_file(store, snapshot.key(file), file, directory / file.name, fetchers, report)
        done += file.size_bytes
        progress("download", done, snapshot.size_bytes)
    world().sync_directory(directory)


def _is_there(path: Path, file: SnapshotFile) -> bool:
    if not path.is_file() or path.stat().st_size != file.size_bytes:
        return False
    with path.open("rb") as handle:
        return file_digest(handle, "sha256").hexdigest() == file.sha256


def _nothing(done_bytes: int) -> None:
    """For those who do not want to know."""


def download_file(
    store: Store, key: str, file: SnapshotFile, path: Path, fetchers: Executor, progress: ProgressOfFile = _nothing
) -> None:
    """Writes one file of a snapshot to ``path``. Raises ``ObjectGone``, and ``CorruptObject`` for other bytes."""
    digest = sha256()

    def fetch(start: int) -> bytearray:
        body = bytearray(min(RANGE_BYTES, file.size_bytes - start))
        store.read_into(key, start, memoryview(body))
        return body

    done = 0
    with disk_errors(path.parent), path.open("wb") as handle:
        try:
            for body in bounded_map(fetchers, fetch, range(0, file.size_bytes, RANGE_BYTES), ahead=FETCH_AHEAD):
                digest.update(body)
                handle.write(body)
                done += len(body)
                progress(done)
            world().sync(handle)
        except NotFound:
            raise ObjectGone(
                f"{key}: its snapshot's marker names it, but it is gone; start from another state"
            ) from None
    if digest.hexdigest() != file.sha256:
        raise CorruptObject(f"{key}: its bytes do not have the digest that its marker names")


def measure_snapshot(
    snapshot: Snapshot, directory: Path, specs: Sequence[TensorSpec], executor: Executor, progress: Progress
) -> list[StateDigest]:
    """Digest of every tensor of a downloaded snapshot. Raises ``CorruptObject`` unless they add up to its state."""
    marker = snapshot_marker_key(snapshot.version)
    try:
        cells = [copies[0] for copies in match_checkpoint(Checkpoint.open(directory), specs)]
    except BadInput as error:
        raise CorruptObject(f"{marker}: its files are no checkpoint of the run: {error}") from None
    keys = [tensor_key(s.name, s.type, s.shape) for s in specs]
    digests = measure(cells, keys, executor, progress=progress)
    if total(digests).hex() != snapshot.state:
        raise CorruptObject(f"{marker}: its files hold state {total(digests).hex()}, it promises {snapshot.state}")
    return digests
