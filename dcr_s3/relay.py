"""The relay: copies a run from one bucket to others as it grows, so that a region fetches each version once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256

from pydantic import BaseModel

from dcr_s3.errors import ChainBroken, CorruptObject, NotFound, PreconditionFailed, RetryError, RunExists, RunMissing
from dcr_s3.format import limits
from dcr_s3.format.ack import DEFAULT_LEASE_S, Ack
from dcr_s3.format.digest import sha256_hex
from dcr_s3.format.keys import MANIFEST_PREFIX, RUN_KEY, ack_key, manifest_key, manifest_version, segment_key
from dcr_s3.format.manifest import Manifest, SegmentEntry
from dcr_s3.format.run import Run
from dcr_s3.format.segment import parse_segment
from dcr_s3.protocol.chain import read_next
from dcr_s3.protocol.position import Position, origin
from dcr_s3.relaying.copying import copy_object, holds
from dcr_s3.relaying.shortcuts import copy_shortcuts
from dcr_s3.store import Store, open_store
from dcr_s3.store.metered import Meter, MeteredStore
from dcr_s3.workers import Progress, bounded_map, no_progress
from dcr_s3.world import timestamp, world

log = logging.getLogger(__name__)

COPIERS = 4
AHEAD_SEGMENT_BYTES = 64 << 20
MAX_BACKOFF_S = 60.0


class RelayReport(BaseModel):
    """What a stretch of relaying did. ``version`` is what every target holds now; ``down_bytes`` were read from the
    source once, ``up_bytes`` written to all targets together."""

    version: int
    versions: int
    down_bytes: int
    up_bytes: int
    requests: int


@dataclass
class _Target:
    store: MeteredStore
    position: Position


class Relay:
    """Copies one run from ``source`` to every store of ``targets``.

    Objects keep their keys and bytes, each is checked against its digest before it becomes visible, and a manifest is
    written after everything that it names. So a target is a run like its source, other relays may read from it, and
    several relays with the same target only do the same thing twice. ``name`` is what the relay acknowledges under at
    the source, so that nothing it still needs is deleted there.
    """

    def __init__(
        self,
        source: str | Store,
        targets: Sequence[str | Store],
        *,
        name: str = "relay",
        acknowledge: bool = True,
        progress: Progress | None = None,
    ) -> None:
        ack_key(name)
        self._source = source
        self._targets = targets
        self._name = name
        self._acknowledge = acknowledge
        self._progress = progress or no_progress

    def copy(self) -> RelayReport:
        """Copies everything that is committed and not at the targets yet, folds and a first snapshot too.

        Raises ``RunMissing``, ``RunExists`` if a target holds another run, ``ChainBroken``, ``CorruptObject`` and store
        errors. What was copied stays and is not copied again.
        """
        with self._open() as work:
            work.catch_up()
            return work.report()

    def follow(
        self,
        on_version: Callable[[RelayReport], None] | None = None,
        stop: threading.Event | None = None,
        until_version: int | None = None,
        poll_interval_s: float = 2.0,
    ) -> None:
        """Copies, then keeps looking until ``stop`` is set or ``until_version`` is at every target.

        Segments of a version that is still being written are copied ahead. Store trouble is logged and waited out.
        """
        halt = stop or threading.Event()
        failures = 0
        while not halt.is_set():
            try:
                with self._open() as work:
                    for report in work.follow(halt, until_version, poll_interval_s):
                        failures = 0
                        if on_version is not None:
                            on_version(report)
                return
            except RetryError as error:
                failures += 1
                delay = min(MAX_BACKOFF_S, poll_interval_s * 2**failures)
                log.warning("%s; trying again in about %.1f s", error, delay)
                world().wait(halt, delay * world().uniform(0.75, 1.25))

    @contextmanager
    def _open(self) -> Iterator[_Work]:
        with ExitStack() as stack:
            down, up = Meter(), Meter()
            source = MeteredStore(self._opened(self._source, stack), down)
            stores = [MeteredStore(self._opened(target, stack), up) for target in self._targets]
            pool = stack.enter_context(ThreadPoolExecutor(COPIERS, thread_name_prefix="dcr-relay"))
            name = self._name if self._acknowledge else None
            yield _Work(source, stores, pool, name, self._progress)

    @staticmethod
    def _opened(where: str | Store, stack: ExitStack) -> Store:
        if not isinstance(where, str):
            return where
        store = open_store(where)
        stack.callback(store.close)
        return store


class _Work:
    """One stretch of relaying, with open stores."""

    def __init__(
        self,
        source: MeteredStore,
        stores: Sequence[MeteredStore],
        pool: ThreadPoolExecutor,
        name: str | None,
        progress: Progress,
    ) -> None:
        self._source = source
        self._pool = pool
        self._name = name
        self._progress = progress
        self._ahead: dict[str, str] = {}
        self._next_seqs = {0: 0}
        self._versions = 0
        self._acked = (-1, 0.0)
        run, start, body = _read_run(source)
        self._run = run
        self._targets = [_Target(s, _target_position(source, s, run, start, body)) for s in stores]

    @property
    def version(self) -> int:
        """The newest version that all targets hold."""
        return min(t.position.version for t in self._targets)

    def report(self) -> RelayReport:
        down, up = self._source.meter.traffic, self._targets[0].store.meter.traffic
        return RelayReport(
            version=self.version,
            versions=self._versions,
            down_bytes=down.down_bytes,
            up_bytes=up.up_bytes,
            requests=down.total_requests + up.total_requests,
        )

    def catch_up(self) -> None:
        """Copies shortcuts, then version after version until none is left."""
        copy_shortcuts(self._source, [t.store for t in self._targets], self._run, self._pool, self._progress)
        while self._step():
            pass
        self._send_ack()

    def follow(self, halt: threading.Event, until_version: int | None, interval_s: float) -> Iterator[RelayReport]:
        self.catch_up()
        yield self.report()
        while not halt.is_set() and (until_version is None or self.version < until_version):
            if self._step():
                copy_shortcuts(self._source, [t.store for t in self._targets], self._run, self._pool, self._progress)
                yield self.report()
            elif not self._copy_ahead():
                self._send_ack()
                world().wait(halt, interval_s * world().uniform(0.75, 1.25))
        self._send_ack()

    def _step(self) -> bool:
        """Copies the next version if it is committed."""
        version = self.version + 1
        try:
            found = self._source.get(manifest_key(version), limit_bytes=limits.MANIFEST_BYTES)
        except NotFound:
            return False
        assert found is not None
        waiting = [t for t in self._targets if t.position.version == version - 1]
        manifest, position = read_next(waiting[0].position, found.body)
        stores = [t.store for t in waiting]
        done, size = 0, sum(e.size_bytes for e in manifest.segments)
        jobs = [(manifest, entry, stores) for entry in manifest.segments]
        for copied in bounded_map(self._pool, self._copy_segment, jobs, ahead=COPIERS):
            done += copied
            self._progress("relay", done, size)
        for target in waiting:
            _put_once(target.store, manifest_key(version), found.body, ChainBroken)
            target.position = position
        self._ahead.clear()
        self._next_seqs = dict.fromkeys({0, *(entry.owner for entry in manifest.segments)}, 0)
        self._versions += 1
        return True

    def _copy_segment(self, job: tuple[Manifest, SegmentEntry, list[MeteredStore]]) -> int:
        manifest, entry, stores = job
        key = segment_key(manifest.version, manifest.attempt, entry.owner, entry.seq)
        if self._ahead.get(key) != entry.sha256:
            missing = [s for s in stores if not holds(s, key, entry.size_bytes)]
            try:
                copy_object(self._source, missing, key, entry.size_bytes, entry.sha256)
            except NotFound:
                raise ChainBroken(f"{self._source.url}/{key}: {manifest_key(manifest.version)} names it") from None
        return entry.size_bytes

    def _copy_ahead(self) -> bool:
        """Copies each owner's next segment of the version being written, if it is there, by the announced place."""
        position = self._targets[0].position
        if position.next_attempt is None or any(t.position != position for t in self._targets):
            return False
        copied = False
        for owner, seq in self._next_seqs.items():
            key = segment_key(position.version + 1, position.next_attempt, owner, seq)
            try:
                found = self._source.get(key, limit_bytes=AHEAD_SEGMENT_BYTES)
                assert found is not None
                _check_segment(key, found.body)
            except NotFound:
                continue
            except CorruptObject as error:
                log.warning("%s is not copied before its commit: %s", key, error)
                continue
            for target in self._targets:
                target.store.put(key, bytearray(found.body))
            self._ahead[key] = sha256_hex(found.body)
            self._next_seqs[owner] = seq + 1
            copied = True
        return copied

    def _send_ack(self) -> None:
        """For a version not acknowledged yet, and when a third of the lease has passed."""
        version, now = self.version, world().monotonic()
        if self._name is None or (version == self._acked[0] and now - self._acked[1] < DEFAULT_LEASE_S / 3):
            return
        position = next(t.position for t in self._targets if t.position.version == version)
        ack = Ack(
            run_id=position.run_id,
            receiver=self._name,
            version=version,
            state=position.state,
            proved_at=timestamp(),
        )
        self._source.put(ack_key(self._name), bytearray(ack.to_bytes()))
        self._acked = version, now


def _read_run(source: Store) -> tuple[Run, Position, bytes]:
    try:
        found = source.get(RUN_KEY, limit_bytes=limits.RUN_BYTES)
    except NotFound:
        raise RunMissing(f"{source.url}: no run here (no {RUN_KEY}); check the address") from None
    assert found is not None
    run = Run.from_bytes(found.body, where=f"{source.url}/{RUN_KEY}")
    return run, origin(run, found.body), found.body


def _target_position(source: Store, target: Store, run: Run, start: Position, body: bytes) -> Position:
    """Where a target stands, after the run itself is there; the run's oldest version if it is empty."""
    _put_once(target, RUN_KEY, body, RunExists)
    held = _versions(target)
    offered = _versions(source)
    if held and (not offered or held[-1] + 1 >= offered[0]):
        found = target.get(manifest_key(held[-1]), limit_bytes=limits.MANIFEST_BYTES)
        assert found is not None
        return _after(Manifest.from_bytes(found.body, where=f"{target.url}/{manifest_key(held[-1])}"), found.body)
    if not offered or offered[0] == 1:
        return start
    key = manifest_key(offered[0])
    found = source.get(key, limit_bytes=limits.MANIFEST_BYTES)
    assert found is not None
    oldest = Manifest.from_bytes(found.body, where=f"{source.url}/{key}")
    return Position(
        run_id=run.run_id,
        version=oldest.parent.version,
        sha256=oldest.parent.sha256,
        epoch=0,
        state=oldest.state_before,
    )


def _versions(store: Store) -> list[int]:
    return sorted(v for v in (manifest_version(o.key) for o in store.list(MANIFEST_PREFIX)) if v is not None)


def _after(manifest: Manifest, body: bytes) -> Position:
    return Position(
        run_id=manifest.run_id,
        version=manifest.version,
        sha256=sha256_hex(body),
        epoch=manifest.epoch,
        state=manifest.state_after,
        step=manifest.step,
        next_attempt=manifest.next_attempt,
    )


def _put_once(store: Store, key: str, body: bytes, error: type[RunExists] | type[ChainBroken]) -> None:
    """Creates an object; the same bytes there already are as good."""
    try:
        store.put(key, bytearray(body), if_absent=True)
        return
    except PreconditionFailed:
        found = store.get(key, limit_bytes=limits.RUN_BYTES)
    if found is None or found.body != body:
        raise error(f"{store.url}/{key}: is not the source's; a relay needs an address of its own for each run")


def _check_segment(key: str, body: bytes) -> None:
    """Place and digests that a segment states of itself. Raises ``CorruptObject``."""
    view = memoryview(body)
    segment = parse_segment(view, where=key)
    header = segment.header
    if segment_key(header.version, header.attempt, header.owner, header.seq) != key:
        raise CorruptObject(f"{key}: its header says that it is another segment")
    for number, block in enumerate(segment.blocks):
        if sha256(view[block.offset : block.offset + block.size_bytes]).digest() != block.sha256:
            raise CorruptObject(f"{key}: block {number} does not have the digest that its index names")
