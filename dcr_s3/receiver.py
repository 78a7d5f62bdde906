"""The receiver: keeps a checkpoint directory at the newest version of a run."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dcr_s3.errors import BadInput, ChainBroken, NotAcknowledged, NotFound
from dcr_s3.following import Follower, pull_report
from dcr_s3.format import limits
from dcr_s3.format.ack import DEFAULT_LEASE_S
from dcr_s3.format.digest import sha256_hex
from dcr_s3.format.keys import ack_key, manifest_key
from dcr_s3.format.signature import Verifier
from dcr_s3.joint import Acknowledger, released_version
from dcr_s3.mirroring import locate, measure_run, open_mirror
from dcr_s3.protocol.polling import Polling
from dcr_s3.reading import load_run
from dcr_s3.replay import Replay
from dcr_s3.reports import PullReport, VerifyReport
from dcr_s3.store import Store, open_poller, open_store
from dcr_s3.targets.checkpoint import Checkpoint, match_checkpoint
from dcr_s3.targets.directory import DirectoryMirror
from dcr_s3.targets.mirror import total, verify_mirror
from dcr_s3.targets.state import STATE_FILE
from dcr_s3.workers import InlineExecutor, Progress, make_executor, no_progress
from dcr_s3.world import world

if TYPE_CHECKING:
    from dcr_s3.targets.engine.target import EngineTarget

log = logging.getLogger(__name__)

FETCHERS = 8


class Receiver:
    """Follows one run into one checkpoint directory.

    ``target`` is made from ``base`` or the run's snapshot if it is empty, and adopted in place if it holds a checkpoint
    of the run. ``name`` is what acknowledgements are filed under; each makes the receiver a member of the run for
    ``lease_s`` seconds, so that what it needs to catch up is kept. With ``released_only`` it applies a version only
    once the sender has released it. ``engine``: an engine that was loaded from the directory and moves with it.
    ``workers``: decoding threads, one per core by default, 0 for none.
    """

    def __init__(
        self,
        url: str | Store,
        target: Path | str,
        *,
        base: Path | str | None = None,
        name: str | None = None,
        acknowledge: bool = True,
        lease_s: int = DEFAULT_LEASE_S,
        released_only: bool = False,
        verifier: Verifier | None = None,
        engine: EngineTarget | None = None,
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        if not 1 <= lease_s <= limits.LEASE_S:
            raise BadInput(f"a lease of {lease_s} s; use 1 to {limits.LEASE_S}")
        self.directory = Path(target)
        self.name = name or default_name(str(self.directory.resolve()))
        ack_key(self.name)
        self._url = url
        self._base = Path(base) if base is not None else None
        self._acknowledge = acknowledge
        self._lease_s = lease_s
        self._released_only = released_only
        self._verifier = verifier
        self._engine = engine
        self._workers = workers
        self._progress = progress or no_progress

    def pull(self, *, to_version: int | None = None) -> PullReport:
        """Applies every version that is committed and not held yet (or all up to ``to_version``), then acknowledges.

        Interrupted anywhere, it leaves a directory that the next call brings to the right bits. Raises ``RunMissing``,
        ``BadInput``, ``WrongBase``, ``ChainBroken``, ``CorruptObject``, ``DiskFull``, ``Busy`` and store errors.
        """
        begun = world().monotonic()
        with self._open(to_version) as (store, replay):
            before = replay.mirror.position.version
            applied = list(replay.catch_up(to_version=self._limit(store, replay.run.run_id, to_version)))
            newest = replay.mirror.position.version
            if to_version is not None and newest < to_version:
                raise ChainBroken(f"{store.url}: version {to_version} is not committed; the newest is {newest}")
            self._acknowledger(store).send(replay.mirror.position)
            replay.mirror.flush()
            return pull_report(replay, before, applied, begun)

    def leave(self) -> None:
        """Gives up membership: nobody waits for this receiver any more, and what it lacks may be deleted.

        The directory stays, and a later pull joins again.
        """
        store = open_store(self._url, verifier=self._verifier)
        try:
            store.delete([ack_key(self.name)])
        finally:
            if isinstance(self._url, str):
                store.close()

    def follow(
        self,
        on_pull: Callable[[PullReport], None] | None = None,
        stop: threading.Event | None = None,
        until_version: int | None = None,
        poll_interval_s: float = 2.0,
        report_held: bool = False,
    ) -> None:
        """Pulls, then keeps looking until ``stop`` is set or ``until_version`` is reached; ``on_pull`` is told of every
        pull, with ``report_held`` also of the version that is held at the start.

        Segments of a version that is still being written are fetched and decoded ahead, so that little is left to do
        after its commit. Store trouble is logged and waited out; other errors are raised as by :meth:`pull`.
        """
        asyncio.run(
            self.follow_async(
                on_pull,
                stop=stop,
                until_version=until_version,
                poll_interval_s=poll_interval_s,
                report_held=report_held,
            )
        )

    async def follow_async(
        self,
        on_pull: Callable[[PullReport], None] | None = None,
        stop: threading.Event | None = None,
        until_version: int | None = None,
        poll_interval_s: float = 2.0,
        report_held: bool = False,
    ) -> None:
        """As :meth:`follow`, on the caller's event loop; heavy work runs in threads."""
        halt = stop or threading.Event()
        with ExitStack() as stack:
            store, replay = await asyncio.to_thread(stack.enter_context, self._open())
            if report_held and on_pull is not None:
                on_pull(pull_report(replay, replay.position.version, [], world().monotonic()))
            poller = open_poller(store)
            follower = Follower(
                replay,
                poller,
                self._acknowledger(store),
                on_pull=on_pull or (lambda report: None),
                halt=halt,
                polling=Polling(poll_interval_s),
                until_version=until_version,
                released_only=self._released_only,
            )
            try:
                await follower.run()
            finally:
                await poller.close()
                await asyncio.to_thread(replay.drop_ahead)
                await asyncio.to_thread(replay.mirror.flush)

    def _limit(self, store: Store, run_id: str, to_version: int | None) -> int | None:
        """The newest version that may be applied, None for any."""
        if not self._released_only:
            return to_version
        released = released_version(store, run_id)
        if to_version is not None and to_version > released:
            raise NotAcknowledged(f"{store.url}: version {to_version} is not released; {released} is")
        return released if to_version is None else to_version

    def _acknowledger(self, store: Store) -> Acknowledger:
        return Acknowledger(store, self.name, self._lease_s, enabled=self._acknowledge)

    @contextmanager
    def _open(self, to_version: int | None = None) -> Iterator[tuple[Store, Replay]]:
        """Store, mirror and threads for one pull or one stretch of following."""
        with ExitStack() as stack:
            store = open_store(self._url, verifier=self._verifier)
            if isinstance(self._url, str):
                stack.callback(store.close)
            run, start = load_run(store)
            decoders = stack.enter_context(make_executor(self._workers, "decode"))
            fetchers = stack.enter_context(
                InlineExecutor() if self._workers == 0 else ThreadPoolExecutor(FETCHERS, thread_name_prefix="dcr-fetch")
            )
            mirror = open_mirror(
                store,
                run,
                start,
                self.directory,
                base=self._base,
                executor=decoders,
                to_version=self._limit(store, run.run_id, to_version),
                progress=self._progress,
            )
            stack.callback(mirror.close)
            moving = self._engine.attach(mirror) if self._engine is not None else mirror
            yield (
                store,
                Replay(store, run, start, moving, decoders=decoders, fetchers=fetchers, progress=self._progress),
            )


def default_name(place: str) -> str:
    """Host name and a digest of where the weights are: stable over restarts, different for every mirror and engine."""
    host = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in socket.gethostname()).lstrip(
        "._-"
    )
    return f"{host[:100] or 'receiver'}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def verify_directory(
    url: str | Store,
    directory: Path | str,
    *,
    verifier: Verifier | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Compares all bits of a directory with the run: with the version its state file names, or, for a plain checkpoint,
    with any version. Changes nothing. Raises ``StateMismatch`` naming the tensors, ``ChainBroken``, ``BadInput``,
    ``Busy``.
    """
    begun = world().monotonic()
    directory = Path(directory)
    report = progress or no_progress
    store = open_store(url, verifier=verifier)
    run, start = load_run(store)
    with ExitStack() as stack:
        executor = stack.enter_context(make_executor(workers, "verify"))
        if (directory / STATE_FILE).exists():
            mirror = DirectoryMirror.open(directory, run)
            stack.callback(mirror.close)
            position = mirror.position
            _check_on_chain(store, position.version, position.sha256, start.sha256)
            state = verify_mirror(mirror, executor, report)
        else:
            cells = [copies[0] for copies in match_checkpoint(Checkpoint.open(directory), run.tensors)]
            digests = measure_run(run, cells, executor, report)
            position, state = locate(store, run, start, digests, what=str(directory)), total(digests)
    return VerifyReport(
        version=position.version,
        state_digest=state.hex(),
        tensors=len(run.tensors),
        dense_bytes=run.dense_bytes,
        seconds=round(world().monotonic() - begun, 6),
    )


def _check_on_chain(store: Store, version: int, digest: str, start_digest: str) -> None:
    if version == 0:
        found_digest = start_digest
    else:
        try:
            found = store.get(manifest_key(version), limit_bytes=limits.MANIFEST_BYTES)
        except NotFound:
            return
        found_digest = sha256_hex(found.body) if found is not None else ""
    if found_digest != digest:
        raise ChainBroken(f"{manifest_key(version)}: is not the version {version} that this directory was pulled from")
