"""A relay that codes a run anew: receivers at its target need no mirror, and versions keep their numbers and bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel

from dcr_s3.errors import BadInput, CommitConflict, NotFound, RetryError, RunExists, RunMissing
from dcr_s3.format.keys import manifest_key
from dcr_s3.format.signature import Signer, Verifier
from dcr_s3.patience import Patience
from dcr_s3.protocol.position import Position
from dcr_s3.reading import load_run, read_position
from dcr_s3.receiver import Receiver
from dcr_s3.sender import Sender
from dcr_s3.sending.create import create_run, read_base
from dcr_s3.snapshots import find_snapshot, upload_snapshot
from dcr_s3.store import Store, open_store
from dcr_s3.targets.checkpoint import Checkpoint
from dcr_s3.targets.files import directory_files
from dcr_s3.targets.state import read_state
from dcr_s3.workers import Progress, make_executor, no_progress
from dcr_s3.world import world


class RecodeReport(BaseModel):
    """What a stretch of recoding did. ``version`` is what the target holds now; ``down_bytes`` were read from the
    source, ``up_bytes`` written to the target, as deltas."""

    version: int
    versions: int
    down_bytes: int
    up_bytes: int


class Recoder:
    """Publishes every version of ``source`` again at ``target``, context free, under the same number.

    ``directory`` keeps a mirror of the source and a baseline for the target: two copies of the weights. The target is a
    run of its own with a ``run_id`` of its own, so nobody can mix its objects with the source's. Killed anywhere, it
    goes on where it was, after comparing the target's state digest with the source's. Where documents are signed,
    ``signer`` is the relay's own. It needs every delta of the run: as a member at the source, which it is under
    ``name``, it keeps them from being deleted.
    """

    def __init__(
        self,
        source: str | Store,
        target: str | Store,
        directory: Path | str,
        *,
        base: Path | str | None = None,
        name: str = "relay",
        acknowledge: bool = True,
        signer: Signer | None = None,
        verifier: Verifier | None = None,
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._target = target
        self._mirror = Path(directory) / "mirror"
        self._state_dir = Path(directory) / "state"
        self._source = source
        self._signer = signer
        self._workers = workers
        self._verifier = verifier
        self._progress = progress or no_progress
        self._receiver = Receiver(
            source,
            self._mirror,
            base=base,
            name=name,
            acknowledge=acknowledge,
            verifier=verifier,
            workers=workers,
            progress=progress,
        )

    def copy(self) -> RecodeReport:
        """Publishes every version that is committed and not at the target yet.

        Raises ``RunMissing``, ``RunExists`` if the target holds another run, ``ChainBroken`` if a delta was deleted,
        ``BadInput`` if the directory is ahead of the target, and store errors.
        """
        with self._open() as work:
            for _ in work:
                pass
            return work.report

    def follow(
        self,
        on_version: Callable[[RecodeReport], None] | None = None,
        stop: threading.Event | None = None,
        until_version: int | None = None,
        poll_interval_s: float = 2.0,
    ) -> None:
        """Publishes, then keeps looking until ``stop`` is set or ``until_version`` is at the target. Store trouble, and
        another relay that was faster, are logged and waited out."""
        halt = stop or threading.Event()
        patience = Patience(poll_interval_s)
        while not halt.is_set():
            try:
                with self._open() as work:
                    while not halt.is_set() and (until_version is None or work.report.version < until_version):
                        report = next(work, None)
                        patience.succeeded()
                        if report is None:
                            world().wait(halt, poll_interval_s * world().uniform(0.75, 1.25))
                        elif on_version is not None:
                            on_version(report)
                return
            except (RetryError, CommitConflict) as error:
                world().wait(halt, patience.after(error) * world().uniform(0.75, 1.25))

    @contextmanager
    def _open(self) -> Iterator[_Work]:
        source = open_store(self._source, verifier=self._verifier)
        start = self._begin(source)
        with Sender.open(
            self._target,
            state_dir=self._state_dir,
            fence=False,
            signer=self._signer,
            verifier=self._verifier,
            workers=self._workers,
            progress=self._progress,
        ) as sender:
            held, wanted = sender.position, read_position(source, start, sender.position.version)
            if held.state != wanted.state:
                raise RunExists(
                    f"the target's version {held.version} has other bits than the source's: somebody else publishes "
                    "there; use another address"
                )
            yield _Work(source, self._receiver, sender, self._mirror)

    def _begin(self, source: Store) -> Position:
        """Creates the target's run where there is none, with version 0 in full; the source's version 0."""
        run, start = load_run(source)
        target = open_store(self._target, signer=self._signer, verifier=self._verifier)
        try:
            made, _ = load_run(target)
        except RunMissing:
            made = run
        if (made is run or not _exists(target, manifest_key(1))) and find_snapshot(target, made.run_id, 0) is None:
            self._receiver.pull(to_version=0)
            _require_not_ahead(self._mirror, 0)
            with make_executor(self._workers, "recode") as executor:
                tensors = read_base(self._mirror)
                made, begin = create_run(target, tensors, context=False, executor=executor, progress=self._progress)
                files = directory_files(Checkpoint.open(self._mirror))
                upload_snapshot(target, begin, files, executor, self._progress)
        if made.coding != "context-free" or made.state != run.state:
            raise RunExists(
                f"{target.url}: holds a run that is not {source.url} coded context free; use another address"
            )
        return start


def _require_not_ahead(mirror: Path, version: int) -> None:
    held = read_state(mirror)
    if held is not None and held.position.version > version:
        raise BadInput(
            f"{mirror}: holds version {held.position.version}, but the target needs version {version} next; "
            "use another directory"
        )


def _exists(store: Store, key: str) -> bool:
    try:
        store.head(key)
    except NotFound:
        return False
    return True


class _Work:
    """Publishes one version after the other; ends where there is none yet, and may then be asked again."""

    def __init__(self, source: Store, receiver: Receiver, sender: Sender, mirror: Path) -> None:
        self._source = source
        self._receiver = receiver
        self._sender = sender
        self._mirror = mirror
        self.report = RecodeReport(version=sender.position.version, versions=0, down_bytes=0, up_bytes=0)

    def __iter__(self) -> Iterator[RecodeReport]:
        return self

    def __next__(self) -> RecodeReport:
        version = self._sender.position.version + 1
        _require_not_ahead(self._mirror, version)
        if not _exists(self._source, manifest_key(version)):
            raise StopIteration
        pulled = self._receiver.pull(to_version=version)
        sent = self._sender.publish(self._mirror, step=pulled.step)
        self.report = RecodeReport(
            version=version,
            versions=self.report.versions + 1,
            down_bytes=self.report.down_bytes + pulled.wire_bytes,
            up_bytes=self.report.up_bytes + sent.wire_bytes,
        )
        return self.report
