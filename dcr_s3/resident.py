"""Follows a run with a whole engine that keeps no mirror: all its ranks together, driven from one place."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal

from dcr_s3.catalogue import Catalogue
from dcr_s3.errors import (
    ApplyExpired,
    BadInput,
    ChainBroken,
    CorruptObject,
    DcrError,
    NotAcknowledged,
    ReplicaUnfit,
    RetryError,
    StateMismatch,
)
from dcr_s3.format.ack import DEFAULT_LEASE_S
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.keys import ack_key, manifest_key
from dcr_s3.format.manifest import Manifest
from dcr_s3.format.region import Region
from dcr_s3.format.run import Run
from dcr_s3.joint import Acknowledger, released_version
from dcr_s3.mirroring import locate
from dcr_s3.patience import Patience
from dcr_s3.protocol.plan import Edge
from dcr_s3.protocol.position import Position
from dcr_s3.rank import revived
from dcr_s3.ranks import Ranks
from dcr_s3.reading import load_run
from dcr_s3.reports import PullReport, VerifyReport
from dcr_s3.store import Store
from dcr_s3.store.nearby import open_nearest
from dcr_s3.targets.checkpoint import describe
from dcr_s3.targets.engine.apply import Gate, NoGate, Verify
from dcr_s3.targets.engine.holding import share_duties
from dcr_s3.ways import Ways
from dcr_s3.workers import Progress, no_progress
from dcr_s3.world import world

log = logging.getLogger(__name__)

Kind = Literal["delta", "fence", "fold", "snapshot"]
Mode = Literal["asynchronous", "synchronous"]
"""Whether requests run while a version is fetched and staged, or the engine is paused for all of it, each segment
being written as it arrives."""

_FETCHERS = 8
_SOON_S, _SELDOM_S = 0.02, 0.25


class ResidentReport(PullReport):
    """One step of an engine. ``pause_s``: from the gate being closed to its being open again; ``rank_wire_bytes``: what
    each rank fetched.
    """

    kind: Kind = "delta"
    pause_s: float = 0.0
    rank_wire_bytes: tuple[int, ...] = ()


class ResidentReceiver:
    """Keeps an engine without a mirror at the newest version of a run.

    ``base`` is the checkpoint directory that the engine was loaded from, as the ranks see it: the bits of some version
    of the run. ``gate`` pauses the engine. ``verify``: ``"written"`` reads back what was written, ``"full"`` also all
    that the engine holds, both before requests run again. ``pause_limit_s`` bounds each rank's writing.

    ``name`` is what acknowledgements are filed under, each a lease of ``lease_s`` seconds; without one none is written.
    With ``released_only`` a version is taken only once the sender has released it. Ranks read from ``nearby`` first, as
    for :func:`open_nearest`; ``store`` is what this process reads through instead of ``url``.
    """

    def __init__(
        self,
        url: str | Store,
        ranks: Ranks,
        base: str,
        *,
        gate: Gate | None = None,
        mode: Mode = "asynchronous",
        verify: Verify = "written",
        pause_limit_s: float = 30.0,
        name: str | None = None,
        lease_s: int = DEFAULT_LEASE_S,
        released_only: bool = False,
        nearby: Sequence[str] = (),
        store: Store | None = None,
        progress: Progress = no_progress,
    ) -> None:
        if name is not None:
            ack_key(name)
        self._url = url
        self._store = store or (open_nearest(url, nearby) if isinstance(url, str) else url)
        self._ranks = ranks
        self._base = base
        self._gate: Gate = gate or NoGate()
        self._mode = mode
        self._verify = verify
        self._limit_s = pause_limit_s
        self._released_only = released_only
        self._nearby = list(nearby)
        self._progress = progress
        self._acknowledger = Acknowledger(self._store, name or "", lease_s, enabled=name is not None)
        self._run: Run | None = None
        self._start: Position | None = None
        self._position: Position | None = None
        self._unfit = ""
        self.routes: list[dict[str, int]] = []

    @property
    def version(self) -> int | None:
        """The version that the engine serves; None before it is opened."""
        return self._position.version if self._position is not None else None

    @property
    def position(self) -> Position:
        """Where the engine stands. Opens it first."""
        if self._position is None:
            self.open()
        assert self._position is not None
        return self._position

    def open(self) -> int:
        """Binds every rank and proves which version the engine holds; returns it.

        What a driver that died left half done is undone, or kept if all ranks have finished it, and the engine is let
        go on. Raises ``BadInput`` naming tensors if it holds none of the run's versions.
        """
        run, start = load_run(self._store)
        opened = self._ranks.call("open", self._url, self._base, self._limit_s, self._nearby)
        self.routes = [one["routes"] for one in opened]
        statuses = self._wait(self._ranks.call("status"))
        self._check_fit(statuses)
        unsettled = any(s["written"] or s["staged"] is not None for s in statuses)
        held = [[Region(t, at, tuple(n), tuple(s)) for t, at, n, s in one["held"]] for one in opened]
        duties = share_duties(run.tensors, held)
        counted = [list(d.counted) for d in duties]
        kept = [list(d.kept) for d in duties]
        digests = _sum(run, self._ranks.call("assign", counted, kept))
        try:
            position = locate(self._store, run, start, digests, what=self._base or "the engine")
        except BadInput:
            if not unsettled:
                raise
            self._ranks.call("undo")
            position = locate(self._store, run, start, _sum(run, self._ranks.call("digests")), what="the engine")
        self._run, self._start, self._position = run, start, position
        self._ranks.call("settle", position.version)
        if unsettled:
            self._gate.reset_caches()
        self._ranks.serving(position.version)
        if unsettled:
            self._gate.open()
        log.info("the engine holds version %d: %s", position.version, self.routes)
        return position.version

    def pull(self, *, to_version: int | None = None) -> list[ResidentReport]:
        """Brings the engine to the newest version (or to ``to_version``), by the cheapest way; a report for each step.
        Then acknowledges.

        Raises ``ApplyExpired``, ``WrongBase``, ``ChainBroken``, ``CorruptObject``, ``StateMismatch``,
        ``NotAcknowledged`` and store errors, after which the engine serves the version before; ``ReplicaUnfit`` if it
        could not be put back: then it stays paused.
        """
        reports = list(self._steps(to_version))
        version = self.position.version
        if to_version is not None and version < to_version:
            if self._released_only:
                raise NotAcknowledged(f"{self._store.url}: version {to_version} is not released")
            raise ChainBroken(f"{self._store.url}: version {to_version} is not committed; the newest is {version}")
        self._acknowledger.send(self.position)
        return reports

    def follow(
        self,
        on_version: Callable[[ResidentReport], None] | None = None,
        stop: threading.Event | None = None,
        until_version: int | None = None,
        poll_interval_s: float = 2.0,
    ) -> None:
        """Pulls until ``stop`` is set or ``until_version`` is served. Trouble that passes is logged and waited out."""
        halt = stop or threading.Event()
        patience = Patience(poll_interval_s)
        while not halt.is_set():
            delay = poll_interval_s
            try:
                for report in self._steps(until_version):
                    patience.succeeded()
                    self._acknowledger.send(self.position)
                    if on_version is not None:
                        on_version(report)
                    if halt.is_set():
                        break
                if self._acknowledger.is_due(self.position):
                    self._acknowledger.send(self.position)
                patience.succeeded()
                if until_version is not None and self.position.version >= until_version:
                    break
            except RetryError as error:
                delay = patience.after(error)
            world().wait(halt, delay * world().uniform(0.75, 1.25))

    def apply(
        self, manifest: Manifest, target: Position, manifest_bytes: int, *, poll_s: float = 0.0
    ) -> ResidentReport:
        """Takes one version's step, as :class:`dcr_s3.ways.Traveller`."""
        return self._move(manifest.kind, target, manifest.statistics.changed_elements, poll_s)

    def take(self, edge: Edge, catalogue: Catalogue) -> ResidentReport:
        """Takes a step that the bucket offers, as :class:`dcr_s3.ways.Traveller`."""
        assert self._run is not None
        target = catalogue.positions[edge.last]
        if edge.kind == "snapshot":
            return self._move("snapshot", target, self._run.total_elements)
        if edge.kind == "fold":
            changed = catalogue.folds[edge.first, edge.last].statistics.changed_elements
            return self._move("fold", target, changed)
        manifest = catalogue.manifests[edge.last]
        return self._move(manifest.kind, target, manifest.statistics.changed_elements)

    def verify(self) -> VerifyReport:
        """Proves that all ranks together hold the version: their digests, read from the engine's memory, add up to the
        run's. Raises ``StateMismatch``.
        """
        begun = world().monotonic()
        position = self.position
        assert self._run is not None
        state = self._prove_resident(position)
        return VerifyReport(
            version=position.version,
            state_digest=state,
            tensors=len(self._run.tensors),
            dense_bytes=self._run.dense_bytes,
            seconds=round(world().monotonic() - begun, 6),
        )

    def _prove_resident(self, position: Position) -> str:
        assert self._run is not None
        total = StateDigest()
        for digest in _sum(self._run, self._ranks.call("digests")):
            total += digest
        if total.hex() != position.state:
            wrong = sorted({name for names in self._ranks.call("wrong") for name in names})
            where = f" in {describe(wrong)}" if wrong else ""
            raise StateMismatch(
                f"the engine does not hold version {position.version}{where}: its ranks' digests add up to "
                f"{total.hex()}, not to {position.state}; something else wrote to it. Load it anew"
            )
        return total.hex()

    def _steps(self, to_version: int | None) -> Iterator[ResidentReport]:
        """Steps to ``to_version``, the newest version or, where that is asked for, the newest that is released."""
        position = self.position
        assert self._start is not None
        if self._released_only:
            released = released_version(self._store, position.run_id)
            to_version = released if to_version is None else min(to_version, released)
        with ThreadPoolExecutor(_FETCHERS, thread_name_prefix="dcr-fetch") as fetchers:
            yield from Ways(self._store, self._start, fetchers).catch_up(self, to_version=to_version)

    def _move(self, kind: Kind, target: Position, changed_elements: int, poll_s: float = 0.0) -> ResidentReport:
        assert self._position is not None and self._run is not None
        if self._unfit:
            raise ReplicaUnfit(f"this engine is paused: {self._unfit}; load it anew")
        begun, before = world().monotonic(), self._position.version
        asynchronous = self._mode == "asynchronous"
        if asynchronous:
            self._check_staged(self._stage(kind, target, write=False), target)
        gate = NoGate() if kind == "fence" else self._gate  # a fence changes nothing
        _close(gate)
        paused = world().monotonic()
        try:
            if not asynchronous:
                self._check_staged(self._stage(kind, target, write=True), target)
            staged = self._ranks.call("status")
            self._ranks.call("apply", target.version, self._verify != "off")
            if self._verify == "full":
                self._prove_resident(target)
            gate.reset_caches()
            self._ranks.serving(target.version)
        except BaseException as error:
            self._put_back(error, gate)
            raise
        gate.open()
        pause_s = world().monotonic() - paused
        self._position = target
        self._ranks.call("settle", target.version)
        stage_s, total_s = max(s["stage_s"] for s in staged), world().monotonic() - begun + poll_s
        return ResidentReport(
            version=target.version,
            from_version=before,
            step=target.step,
            kind=kind,
            changed_elements=changed_elements,
            total_elements=self._run.total_elements,
            wire_bytes=sum(s["wire_bytes"] for s in staged),
            dense_bytes=self._run.dense_bytes,
            seconds={"manifest": poll_s, "fetch_decode": stage_s, "apply": pause_s, "total": total_s},
            up_to_date=False,
            applied_at=world().time(),
            pause_s=pause_s,
            rank_wire_bytes=tuple(s["wire_bytes"] for s in staged),
        )

    def _stage(self, kind: Kind, target: Position, *, write: bool) -> list[dict[str, Any]]:
        """Has all ranks stage a step; requests run meanwhile unless ``write``."""
        step = "delta" if kind == "fence" else kind
        statuses = self._wait(self._ranks.call("stage", step, target.version, write, False))
        for rank, status in enumerate(statuses):
            if status["error"]:
                raise revived(status["error_kind"], f"rank {rank}: {status['error']}")
            if status["staged"] != target.version:
                raise StateMismatch(f"rank {rank}: staged {status['staged']} instead of version {target.version}")
        return statuses

    def _wait(self, statuses: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Waits until no rank stages any more. Asking takes a moment from the engine, so it is done ever less often."""
        delay_s = _SOON_S
        done_bytes = 0
        while any(s["busy"] for s in statuses):
            world().sleep(delay_s)
            delay_s = min(_SELDOM_S, 1.5 * delay_s)
            statuses = self._ranks.call("status")
            wire_bytes = sum(s["wire_bytes"] for s in statuses)
            if wire_bytes > done_bytes:
                done_bytes = wire_bytes
                self._progress("pull", done_bytes, 0)
        return statuses

    def _check_fit(self, statuses: list[dict[str, Any]]) -> None:
        for rank, status in enumerate(statuses):
            if status["unfit"]:
                raise ReplicaUnfit(f"rank {rank} is closed: {status['unfit']}; load the engine anew")

    def _check_staged(self, statuses: list[dict[str, Any]], target: Position) -> None:
        """What all ranks have staged must lead to the state that the manifest promises."""
        assert self._position is not None
        state = StateDigest.from_hex(self._position.state)
        for status in statuses:
            state += StateDigest.from_hex(status["delta"])
        if state.hex() != target.state:
            raise CorruptObject(
                f"{manifest_key(target.version)}: what the ranks decoded leads to state {state.hex()}, it promises "
                f"{target.state}"
            )

    def _put_back(self, reason: BaseException, gate: Gate) -> None:
        try:
            self._ranks.call("undo")
            assert self._position is not None
            if not isinstance(reason, ApplyExpired):
                self._prove_resident(self._position)
            self._ranks.call("settle", self._position.version)
            gate.reset_caches()
            self._ranks.serving(self._position.version)
            gate.open()
        except BaseException as error:
            self._unfit = f"an update failed ({reason}), and so did putting the engine back ({error})"
            log.critical("%s", self._unfit)
            raise ReplicaUnfit(f"{self._unfit}; it stays paused, load it anew") from reason


def _close(gate: Gate) -> None:
    """Closes a gate, or leaves it open."""
    try:
        gate.close()
    except BaseException:
        with suppress(DcrError):
            gate.open()
        raise


def _sum(run: Run, ranks: list[dict[str, str]]) -> list[StateDigest]:
    """Per tensor of the run, the sum of what the ranks say."""
    digests = [StateDigest()] * len(run.tensors)
    for found in ranks:
        for number, digest in found.items():
            digests[int(number)] += StateDigest.from_hex(digest)
    return digests
