"""One rank's part in following a run without a mirror: fetch what it holds, stage, write, prove.

Methods take and return what JSON can say, so that a group of ranks can be driven through any engine's own channel.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dcr_s3 import errors
from dcr_s3.errors import BadInput, DcrError, StateMismatch, WrongBase
from dcr_s3.format.digest import StateDigest
from dcr_s3.intake import Intake
from dcr_s3.protocol.position import Position
from dcr_s3.reading import load_run, read_position
from dcr_s3.store.base import Store
from dcr_s3.store.nearby import open_nearest
from dcr_s3.targets.checkpoint import Checkpoint, describe
from dcr_s3.targets.engine.apply import Applier, NoGate
from dcr_s3.targets.engine.bound import Engine, Update
from dcr_s3.targets.engine.holding import Duty
from dcr_s3.targets.engine.rank import Draft, RankEngine
from dcr_s3.workers import step_back
from dcr_s3.world import world

log = logging.getLogger(__name__)


class Rank:
    """Follows a run with one rank of an engine, number ``index`` of its group. Every method may raise ``DcrError``."""

    def __init__(self, engine: Engine, *, index: int = 0, unwritten: Iterable[str] = ()) -> None:
        self.index = index
        self._engine = engine
        self._unwritten = tuple(unwritten)
        self._store: Store | None = None
        self._rank: RankEngine | None = None
        self._applier: Applier | None = None
        self._position: Position | None = None
        self._before: Position | None = None
        self._staging: threading.Thread | None = None
        self._target: Position | None = None
        self._intake: Intake | None = None
        self._updates: list[Update] = []
        self._written = 0
        self._stage_s = 0.0
        self._measured: dict[int, StateDigest] = {}
        self._error = self._error_kind = ""

    def open(
        self, run: str | Store, base: str, pause_limit_s: float = 30.0, nearby: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Binds the engine, which was loaded from checkpoint directory ``base``. Opened already, it reads from the
        addresses that are given now. ``nearby`` as for :func:`open_nearest`.

        Returns ``held``: regions as [tensor, start, shape, strides]; and how many tensors go which way.
        """
        begun = world().monotonic()
        store = open_nearest(run, nearby) if isinstance(run, str) else run
        found, start = load_run(store)
        if self._rank is None:
            opened = RankEngine(self._engine, found.tensors, Checkpoint.open(Path(base)), unwritten=self._unwritten)
            self._applier = Applier(opened.bound, NoGate(), limit_s=pause_limit_s)
            self._rank, self._run, self._start = opened, found, start
        elif found.run_id != self._run.run_id:
            raise BadInput(
                f"{store.url}: is run {found.run_id}, but the engine follows {self._run.run_id}; start the engine anew"
            )
        self._store = store
        self._applied().limit_s = pause_limit_s
        regions = [[r.tensor, r.start, list(r.shape), list(r.strides)] for r in self._rank.regions]
        routes = self._rank.bound.placement.counts()
        version = self._position.version if self._position is not None else None
        return {"held": regions, "routes": routes, "bind_s": world().monotonic() - begun, "version": version}

    def assign(self, counted: list[list[int]], kept: list[list[int]]) -> dict[str, str]:
        """Takes over its share of the group's proof, of which both lists have one entry per rank; returns
        :meth:`digests`.
        """
        rank = self._opened()
        rank.assign(Duty(tuple(counted[self.index]), tuple(kept[self.index])))
        self._measured = rank.digests()
        return _hex(self._measured)

    def settle(self, version: int) -> None:
        """Says which version the group holds, once that is proved. What led there can no longer be undone."""
        if self._intake is not None and self._is_applied():
            for number, delta in self._intake.draft.deltas.items():
                if number in self._measured:
                    self._measured[number] += delta
        self._position = read_position(self._store_opened(), self._start, version)
        self._forget()

    def digests(self) -> dict[str, str]:
        """By tensor number, the digest of what this rank counts, read from the engine's memory."""
        return _hex(self._opened().digests())

    def wrong(self) -> list[str]:
        """Names of tensors of which this rank does not hold the bits that it has written or was bound with."""
        rank = self._opened()
        written = self._intake.draft.deltas if self._intake is not None and self._is_applied() else {}
        found = rank.digests()
        wrong = (n for n in found if found[n] != self._measured[n] + written.get(n, StateDigest()))
        return [rank.bound.specs[n].name for n in wrong]

    def explain(self) -> list[dict[str, Any]]:
        """For every tensor of the run: its name, route, number of blocks, the engine tensors it goes into, and why."""
        bound = self._opened().bound
        return [
            {
                "name": spec.name,
                "route": plan.route.value,
                "blocks": len(plan.blocks),
                "into": [bound.storages.items[n].names[0] for n in sorted(plan.storages)],
                "reason": plan.reason,
            }
            for spec, plan in zip(bound.specs, bound.placement.plans, strict=True)
        ]

    def stage(self, kind: str, last: int, write: bool = False, wait: bool = True) -> dict[str, Any]:
        """Fetches, decodes and stages a step to version ``last``, which must be committed; returns :meth:`status`.

        ``kind``: "delta", "fold" or "snapshot". With ``write``, each segment (each file of a snapshot) is written to
        the engine as soon as it is staged, for which the engine must be paused. Without ``wait`` it goes on in a thread
        of its own.
        """
        self._applied().check_fit()
        if self._staging is not None and self._staging.is_alive():
            return self.status()
        self._forget()
        self._staging = threading.Thread(target=self._stage, args=(kind, last, write), name="dcr-stage", daemon=True)
        self._staging.start()
        if wait:
            self._staging.join()
        return self.status()

    def status(self) -> dict[str, Any]:
        """Where this rank is. ``delta`` is what its share adds to the state digest once ``staged`` is written;
        ``staged`` and ``written`` tell of a step that is not settled yet.
        """
        draft = self._intake.draft if self._intake is not None else Draft()
        busy = self._staging is not None and self._staging.is_alive()
        return {
            "version": self._position.version if self._position is not None else None,
            "staged": self._target.version if self._target is not None and not busy else None,
            "busy": busy,
            "error": self._error,
            "error_kind": self._error_kind,
            "written": self._written > 0,
            "delta": sum(draft.deltas.values(), StateDigest()).hex(),
            "changed_elements": draft.changed_elements,
            "wire_bytes": self._intake.wire_bytes if self._intake is not None else 0,
            "stage_s": self._stage_s,
            "unfit": self._applied().unfit,
        }

    def apply(self, version: int, verify: bool = True) -> dict[str, Any]:
        """Writes what was staged; the engine must be paused. It can be undone until something else is staged.

        Where it fails this rank is as before, or unfit.
        """
        if self._target is None or self._target.version != version or self._error:
            raise StateMismatch(f"version {version} is not staged here ({self._error or 'nothing is'})")
        bound, updates = self._opened().bound, self._updates[self._written :]

        def prove() -> None:
            for update in self._updates if verify else ():
                bound.check_written(update)

        try:
            self._applied().apply(updates, prove)
        except DcrError as error:
            self._error, self._error_kind = str(error), type(error).__name__
            raise
        self._written = len(self._updates)
        for update in self._updates:
            self._opened().keep(update)
        self._before, self._position = self._position, self._target
        return {"pause_s": self._applied().pause_s, "version": version}

    def undo(self) -> dict[str, Any]:
        """Puts back what :meth:`apply`, or :meth:`stage` with ``write``, has written."""
        if self._staging is not None:
            self._staging.join()
        bound = self._opened().bound
        applied = self._is_applied()
        for update in reversed(self._updates[: self._written]):
            bound.undo(update)
            if applied:
                self._opened().forget(update)
        if applied:
            self._position = self._before
        self._forget()
        return self.status()

    def _stage(self, kind: str, last: int, write: bool) -> None:
        begun = world().monotonic()
        if not write:
            step_back()  # requests run
        try:
            position = self._position
            if position is None:
                raise StateMismatch("this rank does not know which version it holds; settle it first")
            rank = self._opened()
            rank.bound.check_in_place()
            intake = self._intake = Intake(self._store_opened(), self._run, self._start, rank, position, kind, last)
            for update in intake.updates():
                self._updates.append(update)
                if write:
                    rank.bound.write(update, lambda: None)
                    self._written = len(self._updates)
            self._target = intake.target
        except WrongBase as error:
            self._error, self._error_kind = f"{error} ({describe(self.wrong())})", type(error).__name__
        except Exception as error:
            if not isinstance(error, DcrError):
                log.exception("staging failed")
            self._error, self._error_kind = str(error), type(error).__name__
        self._stage_s = world().monotonic() - begun

    def _is_applied(self) -> bool:
        return self._target is not None and self._position is self._target

    def _forget(self) -> None:
        """Drops what was staged."""
        self._target = self._intake = None
        self._error = self._error_kind = ""
        self._updates, self._written = [], 0

    def _opened(self) -> RankEngine:
        if self._rank is None:
            raise StateMismatch("this rank is not bound to a run yet; open it first")
        return self._rank

    def _applied(self) -> Applier:
        self._opened()
        assert self._applier is not None
        return self._applier

    def _store_opened(self) -> Store:
        self._opened()
        assert self._store is not None
        return self._store


def _hex(digests: Mapping[int, StateDigest]) -> dict[str, str]:
    return {str(number): digest.hex() for number, digest in digests.items()}


def answer(rank: Rank, method: str, arguments: list[Any]) -> dict[str, Any]:
    """What goes back over an engine's channel: the result of a method, or what it raised."""
    try:
        return {"result": getattr(rank, method)(*arguments)}
    except Exception as error:
        if not isinstance(error, DcrError):
            log.exception("%s failed", method)
        return {"error": str(error), "error_kind": type(error).__name__}


def results(answers: list[dict[str, Any]]) -> list[Any]:
    """The results of all ranks. Raises the error of the first that failed."""
    for rank, one in enumerate(answers):
        if "error" in one:
            raise revived(one["error_kind"], f"rank {rank}: {one['error']}")
    return [one["result"] for one in answers]


def revived(kind: str, message: str) -> DcrError:
    """An error that was raised in another process, by its name."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, DcrError):
        return found(message)
    return DcrError(f"{kind}: {message}")
