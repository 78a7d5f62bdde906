"""The relay: copies a run from one bucket to others as it grows, so that a region fetches each version once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256

from pydantic import BaseModel

from dcr_s3.errors import (
    BadInput,
    ChainBroken,
    CorruptObject,
    NotFound,
    RetryError,
)
from dcr_s3.format import limits
from dcr_s3.format.ack import DEFAULT_LEASE_S, Ack
from dcr_s3.format.digest import sha256_hex
from dcr_s3.format.keys import ack_key, manifest_key, segment_key
from dcr_s3.format.manifest import Manifest, SegmentEntry
from dcr_s3.format.segment import parse_segment
from dcr_s3.patience import Patience
from dcr_s3.protocol.chain import read_next
from dcr_s3.protocol.position import Position
from dcr_s3.reading import is_committed
from dcr_s3.relaying.copying import copy_object, holds
from dcr_s3.relaying.shortcuts import copy_shortcuts
from dcr_s3.relaying.skipping import read_manifests, widest_fold
from dcr_s3.relaying.standing import put_once, read_run, target_position
from dcr_s3.store import Store, open_store
from dcr_s3.store.metered import Meter, MeteredStore
from dcr_s3.workers import Progress, bounded_map, no_progress
from dcr_s3.world import timestamp, world

log = logging.getLogger(__name__)

COPIERS = 4
AHEAD_SEGMENT_BYTES = 64 << 20


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

    ``fold_behind``: a target that is so many versions behind, as over a link that is too slow for all of them, gets the
    source's fold over those versions instead of their segments, if there is one. Receivers there take the fold too.
    """

    def __init__(
        self,
        source: str | Store,
        targets: Sequence[str | Store],
        *,
        name: str = "relay",
        acknowledge: bool = True,
        fold_behind: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        ack_key(name)
        if fold_behind is not None and fold_behind < 2:
            raise BadInput(f"fold_behind is {fold_behind}; a fold leads over 2 versions or more")
        self._source = source
        self._targets = targets
        self._name = name
        self._acknowledge = acknowledge
        self._fold_behind = fold_behind
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
        patience = Patience(poll_interval_s)
        while not halt.is_set():
            try:
                with self._open() as work:
                    for report in work.follow(halt, until_version, poll_interval_s):
                        patience.succeeded()
                        if on_version is not None:
                            on_version(report)
                return
            except RetryError as error:
                world().wait(halt, patience.after(error) * world().uniform(0.75, 1.25))

    @contextmanager
    def _open(self) -> Iterator[_Work]:
        with ExitStack() as stack:
            down, up = Meter(), Meter()
            source = MeteredStore(self._opened(self._source, stack), down)
            stores = [MeteredStore(self._opened(target, stack), up) for target in self._targets]
            pool = stack.enter_context(ThreadPoolExecutor(COPIERS, thread_name_prefix="dcr-relay"))
            name = self._name if self._acknowledge else None
            yield _Work(source, stores, pool, name, self._fold_behind, self._progress)

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
        fold_behind: int | None,
        progress: Progress,
    ) -> None:
        self._source = source
        self._pool = pool
        self._name = name
        self._fold_behind = fold_behind
        self._progress = progress
        self._ahead: dict[str, str] = {}
        self._next_seqs = {0: 0}
        self._versions = 0
        self._acked = (-1, 0.0)
        run, start, body = read_run(source)
        self._run = run
        self._targets = [_Target(s, target_position(source, s, run, start, body)) for s in stores]

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
        self._copy_shortcuts()
        while self._step():
            pass
        self._send_ack()

    def follow(self, halt: threading.Event, until_version: int | None, interval_s: float) -> Iterator[RelayReport]:
        self.catch_up()
        yield self.report()
        while not halt.is_set() and (until_version is None or self.version < until_version):
            if self._step():
                self._copy_shortcuts()
                yield self.report()
            elif not self._copy_ahead():
                self._send_ack()
                world().wait(halt, interval_s * world().uniform(0.75, 1.25))
        self._send_ack()

    def _copy_shortcuts(self) -> None:
        copy_shortcuts(self._source, [t.store for t in self._targets], self._run, self._pool, self._progress)

    def _skip(self) -> bool:
        """Follows a fold where there is one and the targets are far enough behind to want it."""
        position = self._targets[0].position
        if self._fold_behind is None or any(t.position != position for t in self._targets):
            return False
        far = is_committed(self._source, position.version + self._fold_behind)
        last = widest_fold(self._source, position) if far else None
        if last is None:
            return False
        bodies, end = read_manifests(self._source, position, last)
        self._copy_shortcuts()
        # The next manifest last: until it is there nothing is new, and once it is the fold is known to lead on.
        for key, body in reversed(bodies.items()):
            for target in self._targets:
                put_once(target.store, key, body, ChainBroken)
        self._begin_next(end, ())
        self._versions += len(bodies)
        return True

    def _begin_next(self, position: Position, owners: Iterable[int]) -> None:
        for target in self._targets:
            target.position = max(target.position, position, key=lambda p: p.version)
        self._ahead.clear()
        self._next_seqs = dict.fromkeys({0, *owners}, 0)

    def _step(self) -> bool:
        """Copies the next version if it is committed, or several at once where a fold leads over them."""
        if self._skip():
            return True
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
            put_once(target.store, manifest_key(version), found.body, ChainBroken)
        self._begin_next(position, [entry.owner for entry in manifest.segments])
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
