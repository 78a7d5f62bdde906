"""Tries everything: every order of requests that matters, every fault at every point, by replaying choices.

Orders that differ only in requests to different objects lead to the same; of those, one is tried (sleep sets). Where a
state was seen before with at least as much still to try, a run is given up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from dcr_s3.testing.faults import FaultKind
from dcr_s3.testing.sim.actors import Actor, Kind, Point
from dcr_s3.testing.sim.scenario import Scenario
from dcr_s3.testing.sim.simulation import Pruned
from dcr_s3.testing.sim.store import PAUSE

_TIMING = (FaultKind.DELAY, PAUSE)
"""The order of requests is tried out anyway."""
_SAME_FOR_READS = (FaultKind.LOST_REPLY, FaultKind.SHORT_BODY, FaultKind.TRUNCATED)
"""Without a reply a reader cannot tell what happened to its request."""


@dataclass
class _Fork:
    """A choice among ``limit`` ways, of which number ``taken`` is being tried."""

    limit: int
    taken: int = 0


class ExploringChoices:
    """Walks the tree of choices depth first, one path a run. ``faults`` is how many may happen in a run.

    ``private`` says which requests no other process can be affected by: they wait for nobody.
    """

    timeless = True

    def __init__(self, faults: int, private: Callable[[Point], bool] = lambda _: False) -> None:
        self._faults = faults
        self._private = private
        self._path: list[_Fork] = []
        self._depth = 0
        self._left = faults
        self._asleep: dict[str, Point] = {}
        self._begun = False
        self._seen: dict[Hashable, list[tuple[int, frozenset[str]]]] = {}

    def next_path(self) -> bool:
        """Goes to the next path; False once all were walked."""
        if self._begun:
            while self._path and self._path[-1].taken + 1 >= self._path[-1].limit:
                self._path.pop()
            if not self._path:
                return False
            self._path[-1].taken += 1
        self._begun = True
        self._depth, self._left, self._asleep = 0, self._faults, {}
        return True

    @property
    def path(self) -> tuple[int, ...]:
        """The choices of the present run."""
        return tuple(f.taken for f in self._path)

    def actor(self, ready: Sequence[Actor], state: Callable[[], Hashable]) -> Actor:
        for actor in ready:
            if actor.name not in self._asleep and (actor.next is None or self._is_private(actor.next)):
                return actor
        awake = [a for a in ready if a.name not in self._asleep]
        if not awake:
            raise Pruned
        if self._depth == len(self._path):
            self.require_new(state())
        taken = self._fork(len(awake))
        chosen = awake[taken]
        tried = {a.name: a.next for a in awake[:taken] if a.next is not None}
        assert chosen.next is not None
        point = chosen.next
        self._asleep = {n: p for n, p in (self._asleep | tried).items() if not p.conflicts(point)}
        return chosen

    def fault(self, actor: str, point: Point, possible: Sequence[str]) -> str | None:
        different = [f for f in possible if f not in _TIMING and (point.writes or f not in _SAME_FOR_READS)]
        if not self._left or not different:
            return None
        taken = self._fork(1 + len(different))
        if not taken:
            return None
        self._left -= 1
        return different[taken - 1]

    def ended(self, state: Callable[[], Hashable]) -> None:
        if self._depth == len(self._path):
            self._left = 0
            self.require_new(("ended", state()))

    def number(self, limit: int) -> int:
        """Always 0: after a power loss nothing is left that was not made durable."""
        return 0

    def require_new(self, state: Hashable) -> None:
        """Raises ``Pruned`` for a state from which everything that may follow was tried already."""
        asleep = frozenset(self._asleep)
        seen = self._seen.setdefault(state, [])
        if any(left >= self._left and others <= asleep for left, others in seen):
            raise Pruned
        seen.append((self._left, asleep))

    def _is_private(self, point: Point) -> bool:
        return point.kind is not Kind.REQUEST or self._private(point)

    def _fork(self, limit: int) -> int:
        if limit == 1:
            return 0
        if self._depth == len(self._path):
            self._path.append(_Fork(limit))
        fork = self._path[self._depth]
        assert fork.limit == limit, "the simulation is not deterministic"
        self._depth += 1
        return fork.taken


@dataclass(frozen=True)
class Exploration:
    """``runs`` were made to their end, ``pruned`` were given up because another run shows the same."""

    runs: int
    pruned: int
    steps: int
    seconds: float


def explore(make: Callable[[ExploringChoices], Scenario], choices: ExploringChoices) -> Exploration:
    """Runs a fresh scenario for every path. Raises ``Violation`` for the first one that breaks a promise."""
    begun = time.monotonic()
    runs = pruned = steps = 0
    while choices.next_path():
        scenario = make(choices)
        try:
            scenario.run()
            runs += 1
        except Pruned:
            pruned += 1
        steps += scenario.simulation.steps
    return Exploration(runs, pruned, steps, round(time.monotonic() - begun, 3))
