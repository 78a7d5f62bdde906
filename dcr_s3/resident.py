"""Follows a run with a whole engine that keeps no mirror: all its ranks together, driven from one place."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Literal, Protocol

from dcr_s3.errors import ApplyExpired, CorruptObject, ReplicaUnfit, RetryError, StateMismatch
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.keys import manifest_key
from dcr_s3.format.region import Region
from dcr_s3.format.run import Run
from dcr_s3.mirroring import locate
from dcr_s3.protocol.position import Position
from dcr_s3.rank import Rank, revived
from dcr_s3.reading import fetch_manifest, load_run
from dcr_s3.reports import Report, VerifyReport
from dcr_s3.store import Store, open_store
from dcr_s3.targets.engine.apply import Gate, NoGate, Verify
from dcr_s3.targets.engine.bound import Engine
from dcr_s3.targets.engine.holding import share_duties
from dcr_s3.world import world

log = logging.getLogger(__name__)

Mode = Literal["asynchronous", "synchronous"]
"""Whether requests run while a version is fetched and staged, or the engine is paused for all of it, each segment
being written as it arrives."""

_MAX_BACKOFF_S = 60.0


class Ranks(Protocol):
    """A channel to all ranks of an engine."""

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of every rank's :class:`Rank` and returns their results in the order of ranks.

        Raises ``DcrError`` if any of them failed.
        """

    def serving(self, version: int) -> None:
        """Tells the engine which version it serves from now on. Called while it is paused."""


class LocalRank:
    """An engine in this process, as its only rank."""

    def __init__(self, engine: Engine | Rank) -> None:
        self.rank = engine if isinstance(engine, Rank) else Rank(engine)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """As :meth:`Ranks.call`."""
        return [getattr(self.rank, method)(*arguments)]

    def serving(self, version: int) -> None:
        """Nobody to tell."""


class ResidentReport(Report):
    """One version brought into an engine. ``pause_s``: from the gate being closed to its being open again;
    ``rank_wire_bytes``: what each rank fetched.
    """

    pause_s: float = 0.0
    rank_wire_bytes: tuple[int, ...] = ()


class ResidentReceiver:
    """Keeps an engine without a mirror at the newest version of a run.

    ``base`` is the checkpoint directory that the engine was loaded from, as the ranks see it: the bits of some version
    of the run. ``gate`` pauses the engine. ``verify``: ``"written"`` reads back what was written, ``"full"`` also all
    that the engine holds, both before requests run again. ``pause_limit_s`` bounds each rank's writing.
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
    ) -> None:
        self._url = url
        self._store = open_store(url) if isinstance(url, str) else url
        self._ranks = ranks
        self._base = base
        self._gate: Gate = gate or NoGate()
        self._mode = mode
        self._verify = verify
        self._limit_s = pause_limit_s
        self._run: Run | None = None
        self._position: Position | None = None
        self._unfit = ""
        self.routes: list[dict[str, int]] = []

    @property
    def version(self) -> int | None:
        """The version that the engine serves; None before it is opened."""
        return self._position.version if self._position is not None else None

    def open(self) -> int:
        """Binds every rank and proves which version the engine holds; returns it.

        Raises ``BadInput`` naming tensors if it holds none of the run's versions.
        """
        run, start = load_run(self._store)
        opened = self._ranks.call("open", self._url, self._base, self._limit_s)
        self.routes = [one["routes"] for one in opened]
        held = [[Region(t, at, tuple(n), tuple(s)) for t, at, n, s in one["held"]] for one in opened]
        duties = share_duties(run.tensors, held)
        counted = [list(d.counted) for d in duties]
        kept = [list(d.kept) for d in duties]
        digests = _sum(run, self._ranks.call("assign", counted, kept))
        self._position = locate(self._store, run, start, digests, what=self._base)
        self._run = run
        self._ranks.call("settle", self._position.version)
        self._ranks.serving(self._position.version)
        log.info("the engine holds version %d: %s", self._position.version, self.routes)
        return self._position.version

    def pull(self, *, to_version: int | None = None) -> list[ResidentReport]:
        """Brings the engine through every version that is committed (or all up to ``to_version``); a report for each.

        Raises ``ApplyExpired``, ``WrongBase``, ``ChainBroken``, ``CorruptObject``, ``StateMismatch`` and store errors,
        after which the engine serves the version before; ``ReplicaUnfit`` if it could not be put back: then it stays
        paused.
        """
        if self._position is None:
            self.open()
        reports = []
        while to_version is None or (self.version or 0) < to_version:
            report = self._step()
            if report is None:
                break
            reports.append(report)
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
        failures = 0
        while not halt.is_set() and (until_version is None or (self.version or 0) < until_version):
            try:
                if self._position is None:
                    self.open()
                report = self._step()
                failures = 0
            except RetryError as error:
                failures += 1
                delay = min(_MAX_BACKOFF_S, poll_interval_s * 2**failures)
                log.warning("%s; trying again in about %.1f s", error, delay)
                world().wait(halt, delay * world().uniform(0.75, 1.25))
                continue
            if report is not None and on_version is not None:
                on_version(report)
            if report is None:
                world().wait(halt, poll_interval_s * world().uniform(0.75, 1.25))

    def verify(self) -> VerifyReport:
        """Proves that all ranks together hold the version: their digests, read from the engine's memory, add up to the
        run's. Raises ``StateMismatch``.
        """
        begun = world().monotonic()
        if self._position is None or self._run is None:
            self.open()
        assert self._position is not None and self._run is not None
        state = self._prove_resident(self._position)
        return VerifyReport(
            version=self._position.version,
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
            raise StateMismatch(
                f"the engine does not hold version {position.version}: its ranks' digests add up to {total.hex()}, not "
                f"to {position.state}; something else wrote to it, or its memory moved. Load it anew"
            )
        return total.hex()

    def _step(self) -> ResidentReport | None:
        assert self._position is not None and self._run is not None
        if self._unfit:
            raise ReplicaUnfit(f"this engine is paused: {self._unfit}; load it anew")
        found = fetch_manifest(self._store, self._position)
        if found is None:
            return None
        begun = world().monotonic()
        manifest, target, _ = found
        asynchronous = self._mode == "asynchronous"
        if asynchronous:
            self._check_staged(self._stage(target, write=False), target)
        gate = self._gate if manifest.segments else NoGate()  # a fence changes nothing
        gate.close()
        paused = world().monotonic()
        try:
            if not asynchronous:
                self._check_staged(self._stage(target, write=True), target)
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
        return ResidentReport(
            version=target.version,
            step=target.step,
            changed_elements=manifest.statistics.changed_elements,
            total_elements=self._run.total_elements,
            wire_bytes=sum(s["wire_bytes"] for s in staged),
            dense_bytes=self._run.dense_bytes,
            seconds={"stage": max(s["stage_s"] for s in staged), "total": world().monotonic() - begun},
            pause_s=pause_s,
            rank_wire_bytes=tuple(s["wire_bytes"] for s in staged),
        )

    def _stage(self, target: Position, *, write: bool) -> list[dict[str, Any]]:
        """Has all ranks stage the version; requests run meanwhile unless ``write``."""
        statuses = self._ranks.call("stage", write, False)
        while any(s["busy"] for s in statuses):
            world().sleep(0.02)
            statuses = self._ranks.call("status")
        for rank, status in enumerate(statuses):
            if status["error"]:
                raise revived(status["error_kind"], f"rank {rank}: {status['error']}")
            if status["staged"] != target.version:
                raise StateMismatch(f"rank {rank}: staged {status['staged']} instead of version {target.version}")
        return statuses

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
            gate.reset_caches()
            self._ranks.serving(self._position.version)
            gate.open()
        except BaseException as error:
            self._unfit = f"an update failed ({reason}), and so did putting the engine back ({error})"
            log.critical("%s", self._unfit)
            raise ReplicaUnfit(f"{self._unfit}; it stays paused, load it anew") from reason


def _sum(run: Run, ranks: list[dict[str, str]]) -> list[StateDigest]:
    """Per tensor of the run, the sum of what the ranks say."""
    digests = [StateDigest()] * len(run.tensors)
    for found in ranks:
        for number, digest in found.items():
            digests[int(number)] += StateDigest.from_hex(digest)
    return digests
