"""An engine that follows a run: a mirror on disk keeps the canonical bits, the engine moves with it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from pathlib import Path

import numpy as np

from dcr_s3.errors import StateMismatch
from dcr_s3.format.cells import Cells
from dcr_s3.format.digest import StateDigest
from dcr_s3.protocol.position import Position
from dcr_s3.targets.checkpoint import describe
from dcr_s3.targets.engine.apply import Applier, Gate, NoGate, Verify
from dcr_s3.targets.engine.bound import BoundEngine, Engine, Update
from dcr_s3.targets.engine.changes import Changed, journal_changes
from dcr_s3.targets.files import SourceFile
from dcr_s3.targets.mirror import Mirror
from dcr_s3.targets.placement import Route
from dcr_s3.targets.redo import Journal
from dcr_s3.targets.residence import block_cells

log = logging.getLogger(__name__)


class EngineTarget:
    """An engine, how it is paused, and what is proved before it serves again.

    It is bound to the run when a receiver first opens it, and must then hold the bits of the version that the mirror
    is at. ``verify`` is of ``Verify``; ``pause_limit_s`` bounds a pause; ``unwritten`` names engine parameters that the
    run does not fill.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        gate: Gate | None = None,
        verify: Verify = "written",
        pause_limit_s: float = 30.0,
        unwritten: Iterable[str] = (),
    ) -> None:
        self.engine = engine
        self.gate: Gate = gate or NoGate()
        self.verify: Verify = verify
        self.pause_limit_s = pause_limit_s
        self.unwritten = tuple(unwritten)
        self.position: Position | None = None
        self._applier: Applier | None = None

    @property
    def version(self) -> int | None:
        """The version that the engine serves; None before it is bound."""
        return self.position.version if self.position is not None else None

    @property
    def pause_s(self) -> float:
        """Length of the last pause, gate closed to gate open."""
        return self._applier.pause_s if self._applier is not None else 0.0

    @property
    def bound(self) -> BoundEngine:
        """The engine with its placement. Raises ``StateMismatch`` before it is bound."""
        return self._opened().bound

    def attach(self, mirror: Mirror) -> Mirror:
        """The mirror that moves both; binds the engine the first time, and brings it to the mirror's version."""
        if self._applier is None:
            bound = BoundEngine(self.engine, mirror.specs, mirror.cells, unwritten=self.unwritten)
            self._applier = Applier(bound, self.gate, limit_s=self.pause_limit_s)
            self.position = mirror.position
            log.info("bound to version %d: %s", mirror.position.version, bound.placement.counts())
        elif self.position is not None and self.position.version < mirror.position.version:
            self._apply(self._differences(mirror), mirror.position, mirror)
        return EngineMirror(mirror, self)

    def advance(self, target: Position, journals: Sequence[Journal], mirror: Mirror) -> None:
        """Brings the engine from the mirror's version to ``target``, as the journals say."""
        if self.position is not None and self.position.sha256 == target.sha256:
            return  # an earlier attempt got this far, but its mirror did not
        self._opened().check_fit()
        changes = journal_changes(journals, mirror)
        self._apply(self.bound.stage(changes, mirror.cells), target, mirror, changes)

    def check(self, mirror: Mirror) -> None:
        """Reads back all that the engine holds. Raises ``StateMismatch`` naming tensors with other bits.

        The engine must not run meanwhile if the loader is needed for some tensors.
        """
        self.bound.check_in_place()
        self._check_planned(mirror.digests)
        self.bound.check_converted(mirror.cells)

    def _apply(
        self, update: Update, target: Position, mirror: Mirror, changes: dict[int, Changed] | None = None
    ) -> None:
        applier = self._opened()
        if not update.scatters and not update.groups:
            self.position = target
            return

        def prove() -> None:
            if self.verify != "off":
                applier.bound.check_written(update)
            if self.verify == "full":
                self._check_all(mirror, changes or {})

        applier.apply([update], prove, lambda: self._check_all(mirror, {}))
        self.position = target
        log.info("version %d: %d elements, pause %.4f s", target.version, update.changed_elements, self.pause_s)

    def _check_all(self, mirror: Mirror, changes: dict[int, Changed]) -> None:
        """Everything, against the mirror's bits with the changes made."""
        bound = self.bound

        def canonical(number: int) -> Cells:
            cells = mirror.cells(number)
            return changes[number].over(cells) if number in changes else cells

        wrong = [
            number
            for number in bound.placement.by_route(Route.PLANNED)
            if not all(
                np.array_equal(block_cells(bound.storages, b), b.region.gather(canonical(number)))
                for b in bound.placement.plans[number].blocks
            )
        ]
        if wrong:
            raise StateMismatch(_wrong(bound, wrong))
        bound.check_converted(canonical)

    def _check_planned(self, digests: Sequence[StateDigest]) -> None:
        bound = self.bound
        wrong = [n for n, digest in bound.digests() if bound.placement.holds(n) and digest != digests[n]]
        if wrong:
            raise StateMismatch(_wrong(bound, wrong))

    def _differences(self, mirror: Mirror) -> Update:
        """What separates the engine from a mirror that was moved without it."""
        bound = self.bound
        found: dict[int, Changed] = {}
        held: dict[int, Cells] = {}
        for number in range(len(bound.specs)):
            cells = mirror.cells(number)
            old = cells.copy()
            if bound.placement.plans[number].route is Route.PLANNED:
                for block in bound.placement.plans[number].blocks:
                    index = block.region.canonical(np.arange(block.region.cells, dtype=np.uint32))
                    old[index] = block_cells(bound.storages, block)
                positions = np.flatnonzero(old != cells).astype(np.int64)
            else:
                positions = np.arange(cells.size, dtype=np.int64)
            if positions.size:
                found[number], held[number] = Changed(positions, cells[positions]), old
        return bound.stage(found, lambda n: held.get(n, mirror.cells(n)))

    def _opened(self) -> Applier:
        if self._applier is None:
            raise StateMismatch("the engine is not bound to a run yet; let a receiver open it first")
        return self._applier


class EngineMirror(Mirror):
    """A mirror and an engine that move together: the engine first, since it can be put back."""

    def __init__(self, inner: Mirror, target: EngineTarget) -> None:
        super().__init__(inner.specs, inner.position, inner.digests)
        self._inner = inner
        self._target = target

    def copies(self, number: int) -> Sequence[Cells]:
        return self._inner.copies(number)

    @property
    def workspace(self) -> Path:
        return self._inner.workspace

    def files(self) -> list[SourceFile]:
        return self._inner.files()

    def advance(
        self, target: Position, redo: Sequence[Journal], digests: Sequence[StateDigest], executor: Executor
    ) -> None:
        for journal in redo:
            journal.close()
        self._target.advance(target, redo, self._inner)
        self._inner.advance(target, redo, digests, executor)
        self.position, self.digests = target, list(digests)

    def flush(self) -> None:
        self._inner.flush()

    def close(self) -> None:
        self._inner.close()


def _wrong(bound: BoundEngine, numbers: Sequence[int]) -> str:
    return f"{describe([bound.specs[n].name for n in numbers])}: the engine does not hold the version's bits"
