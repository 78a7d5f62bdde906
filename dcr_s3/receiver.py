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

from dcr_s3.errors import BadInput, ChainBroken, Forbidden, NotAcknowledged, NotFound, RetryError
from dcr_s3.format import limits
from dcr_s3.format.ack import DEFAULT_LEASE_S, Ack
from dcr_s3.format.digest import sha256_hex
from dcr_s3.format.keys import RELEASE_KEY, ack_key, manifest_key
from dcr_s3.format.signature import Verifier
from dcr_s3.joint import parse_release, read_release
from dcr_s3.mirroring import locate, measure_run, open_mirror
from dcr_s3.protocol.chain import read_next
from dcr_s3.protocol.polling import Polling
from dcr_s3.reading import load_run
from dcr_s3.replay import Applied, Replay
from dcr_s3.reports import PullReport, VerifyReport
from dcr_s3.store import Poller, Store, open_poller, open_store
from dcr_s3.targets.checkpoint import Checkpoint, match_checkpoint
from dcr_s3.targets.directory import DirectoryMirror
from dcr_s3.targets.mirror import total, verify_mirror
from dcr_s3.targets.state import STATE_FILE
from dcr_s3.workers import InlineExecutor, Progress, make_executor, no_progress
from dcr_s3.world import timestamp, world

if TYPE_CHECKING:
    from dcr_s3.targets.engine.target import EngineTarget

log = logging.getLogger(__name__)

FETCHERS = 8
MAX_BACKOFF_S = 60.0


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
        self.name = name or default_name(self.directory)
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
            limit = self._limit(store, replay.run.run_id, to_version)
            applied = list(replay.catch_up(to_version=limit))
            newest = replay.mirror.position.version
            if to_version is not None and newest < to_version:
                raise ChainBroken(f"{store.url}: version {to_version} is not committed; the newest is {newest}")
            self._send_ack(store, replay)
            replay.mirror.flush()
            return self._report(replay, before, applied, begun)

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

    def _limit(self, store: Store, run_id: str, to_version: int | None) -> int | None:
        """The newest version that may be applied, None for any."""
        if not self._released_only:
            return to_version
        found = read_release(store, run_id)
        released = found[0].version if found is not None else 0
        if to_version is not None and to_version > released:
            raise NotAcknowledged(f"{store.url}: version {to_version} is not released; {released} is")
        return released if to_version is None else to_version

    def follow(
        self,
        on_pull: Callable[[PullReport], None] | None = None,
        stop: threading.Event | None = None,
        until_version: int | None = None,
        poll_interval_s: float = 2.0,
    ) -> None:
        """Pulls, then keeps looking until ``stop`` is set or ``until_version`` is reached; ``on_pull`` is told of every
        pull.

        Segments of a version that is still being written are fetched and decoded ahead, so that little is left to do
        after its commit. Store trouble is logged and waited out; other errors are raised as by :meth:`pull`.
        """
        asyncio.run(self.follow_async(on_pull, stop=stop, until_version=until_version, poll_interval_s=poll_interval_s))

    async def follow_async(
        self,
        on_pull: Callable[[PullReport], None] | None = None,
        stop: threading.Event | None = None,
        until_version: int | None = None,
        poll_interval_s: float = 2.0,
    ) -> None:
        """As :meth:`follow`, on the caller's event loop; heavy work runs in threads."""
        halt = stop or threading.Event()
        with ExitStack() as stack:
            store, replay = await asyncio.to_thread(stack.enter_context, self._open())
            poller = open_poller(store)
            pulled = on_pull or (lambda report: None)
            try:
                await self._loop(store, poller, replay, pulled, halt, until_version, Polling(poll_interval_s))
            finally:
                await poller.close()
                await asyncio.to_thread(replay.drop_ahead)
                await asyncio.to_thread(replay.mirror.flush)

    async def _loop(
        self,
        store: Store,
        poller: Poller,
        replay: Replay,
        on_pull: Callable[[PullReport], None],
        halt: threading.Event,
        until_version: int | None,
        polling: Polling,
    ) -> None:
        look = self._look_released if self._released_only else self._look
        failures = 0
        caught_up = False
        acked: tuple[int, float] | None = None
        while not halt.is_set() and (until_version is None or replay.mirror.position.version < until_version):
            try:
                if polling.at_segment:
                    delay = polling.after_segment(found=await asyncio.to_thread(replay.stage_ahead, polling.seq))
                else:
                    found = not caught_up and await self._catch_up(store, replay, on_pull, halt, until_version)
                    caught_up = True
                    found = found or await look(poller, store, replay, on_pull, halt)
                    if not found and self._ack_is_due(replay, acked):
                        await asyncio.to_thread(self._send_ack, store, replay)
                        await asyncio.to_thread(replay.mirror.flush)
                        acked = replay.mirror.position.version, world().monotonic()
                    announced = replay.mirror.position.next_attempt is not None and not self._released_only
                    delay = polling.after_manifest(found=found, announced=announced)
                failures = 0
            except RetryError as error:
                failures += 1
                delay = min(MAX_BACKOFF_S, polling.interval_s * 2**failures)
                log.warning("%s; trying again in about %.1f s", error, delay)
            if delay:
                await asyncio.to_thread(world().wait, halt, delay * world().uniform(0.75, 1.25))
        if self._ack_is_due(replay, acked):
            await asyncio.to_thread(self._send_ack, store, replay)

    def _ack_is_due(self, replay: Replay, acked: tuple[int, float] | None) -> bool:
        """True for a version not acknowledged yet, and when a third of the lease has passed."""
        if acked is None or acked[0] != replay.mirror.position.version:
            return True
        return world().monotonic() - acked[1] > self._lease_s / 3

    async def _catch_up(
        self,
        store: Store,
        replay: Replay,
        on_pull: Callable[[PullReport], None],
        halt: threading.Event,
        to_version: int | None,
    ) -> bool:
        """Goes to the newest version by the cheapest way; True if there was anything to apply."""
        steps = replay.catch_up(to_version=await asyncio.to_thread(self._limit, store, replay.run.run_id, to_version))
        found = False
        while not halt.is_set():
            before, begun = replay.mirror.position.version, world().monotonic()
            applied = await asyncio.to_thread(next, steps, None)
            if applied is None:
                break
            found = True
            on_pull(self._report(replay, before, [applied], begun))
        return found

    async def _look(
        self,
        poller: Poller,
        store: Store,
        replay: Replay,
        on_pull: Callable[[PullReport], None],
        halt: threading.Event,
    ) -> bool:
        """One look at the next manifest; applies it if it is there."""
        position = replay.mirror.position
        begun = world().monotonic()
        try:
            found = await poller.get(manifest_key(position.version + 1), limit_bytes=limits.MANIFEST_BYTES)
        except NotFound:
            return False
        assert found is not None
        manifest, target = read_next(position, found.body)
        poll_s = world().monotonic() - begun
        try:
            applied = await asyncio.to_thread(replay.apply, manifest, target, len(found.body), poll_s=poll_s)
        except ChainBroken as error:
            log.info("%s; looking for another way", error)
            return await self._catch_up(store, replay, on_pull, halt, None)
        on_pull(self._report(replay, position.version, [applied], begun))
        return True

    async def _look_released(
        self,
        poller: Poller,
        store: Store,
        replay: Replay,
        on_pull: Callable[[PullReport], None],
        halt: threading.Event,
    ) -> bool:
        """One look at the release; goes to it if it has moved."""
        try:
            found = await poller.get(RELEASE_KEY, limit_bytes=limits.RELEASE_BYTES)
        except NotFound:
            return False
        assert found is not None
        released = parse_release(store, replay.run.run_id, found.body).version
        if released <= replay.mirror.position.version:
            return False
        return await self._catch_up(store, replay, on_pull, halt, released)

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

    def _send_ack(self, store: Store, replay: Replay) -> None:
        if not self._acknowledge:
            return
        position = replay.mirror.position
        ack = Ack(
            run_id=position.run_id,
            receiver=self.name,
            version=position.version,
            state=position.state,
            proved_at=timestamp(),
            lease_s=self._lease_s,
        )
        try:
            store.put(ack_key(self.name), bytearray(ack.to_bytes()))
        except Forbidden as error:
            raise Forbidden(
                f"{error}; version {position.version} is in place, only its acknowledgement is not: "
                "allow writing acks/*, or do not acknowledge"
            ) from error

    def _report(self, replay: Replay, before: int, applied: list[Applied], begun: float) -> PullReport:
        seconds: dict[str, float] = {}
        for one in applied:
            for stage, length in one.seconds.items():
                seconds[stage] = round(seconds.get(stage, 0.0) + length, 6)
        seconds["total"] = round(world().monotonic() - begun, 6)
        position = replay.mirror.position
        return PullReport(
            version=position.version,
            from_version=before,
            step=position.step,
            changed_elements=sum(a.changed_elements for a in applied),
            total_elements=replay.run.total_elements,
            wire_bytes=sum(a.wire_bytes for a in applied),
            dense_bytes=replay.run.dense_bytes,
            seconds=seconds,
            up_to_date=not applied,
            applied_at=world().time(),
        )


def default_name(directory: Path) -> str:
    """Host name and a digest of the directory's path: stable over restarts, different for every mirror."""
    host = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in socket.gethostname()).lstrip(
        "._-"
    )
    return f"{host[:100] or 'receiver'}-{hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:8]}"


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
