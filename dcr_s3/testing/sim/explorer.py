"""Tries everything: every order of requests that matters, every fault at every point, by replaying choices.

Orders that differ only in requests to different objects lead to the same; of those, one is tried (sleep sets). Where a
state was seen before with at least as much still to try, a run is given up. A state is the bucket, what every running
process has been told since it last knew nothing but its disk, and the disks of those that will go on later. Names that
processes draw by chance count as new whichever they are.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from dcr_s3.testing.faults import FaultKind
from dcr_s3.testing.sim.actors import Actor, Point
from dcr_s3.testing.sim.choices import CRASH, POWER_LOSS
from dcr_s3.testing.sim.scenario import Scenario
from dcr_s3.testing.sim.simulation import Pruned, Violation
from dcr_s3.testing.sim.store import PAUSE

_TIMING = (FaultKind.DELAY, PAUSE)
"""The order of requests is tried out anyway."""
_SAME_FOR_READS = (FaultKind.LOST_REPLY, FaultKind.SHORT_BODY, FaultKind.TRUNCATED)
"""Without a reply a reader cannot tell what happened to its request."""


@dataclass
class _Fork:
    """A choice among ``limit`` ways, of which number ``taken`` is being tried. Among ``faults`` the first is none."""

    limit: int
    faults: Sequence[str] = ()
    taken: int = 0


Private = Callable[[Actor, Sequence[Actor]], bool]


class ExploringChoices:
    """Walks the tree of choices depth first, one path a run. ``faults`` is how many may happen in a run.

    ``private`` says whether a process's next request neither affects nor depends on what any other one will ever do:
    such requests wait for nobody.
    """

    timeless = True

    def __init__(self, faults: int, private: Private = lambda actor, others: False) -> None:
        self.tried: Counter[str] = Counter()
        self._faults = faults
        self._private = private
        self._path: list[_Fork] = []
        self._depth = 0
        self._left = faults
        self._asleep: dict[str, Point] = {}
        self._begun = False
        self._passed: set[tuple[Hashable, int]] = set()
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
        self._passed.clear()
        return True

    @property
    def path(self) -> tuple[int, ...]:
        """The choices of the present run."""
        return tuple(f.taken for f in self._path)

    def actor(self, ready: Sequence[Actor], state: Callable[[], Hashable]) -> Actor:
        awake = [a for a in ready if a.name not in self._asleep]
        if not awake:
            raise Pruned
        own = next((a for a in awake if self._private(a, [o for o in ready if o is not a])), None)
        self._require_progress(state(), alone=own is not None or len(ready) == 1)
        if own is not None:
            return own
        taken = self._fork(len(awake))
        chosen = awake[taken]
        tried = {a.name: a.next for a in awake[:taken] if a.next is not None}
        assert chosen.next is not None
        point = chosen.next
        self._asleep = {n: p for n, p in (self._asleep | tried).items() if not p.conflicts(point)}
        return chosen

    def fault(self, point: Point, possible: Sequence[str], left: Callable[[str], Hashable]) -> str | None:
        if not self._left:
            return None
        if self._depth < len(self._path):
            different = self._path[self._depth].faults
        else:
            different = [f for f in possible if f not in _TIMING and (point.writes or f not in _SAME_FOR_READS)]
            # Between two changes of the disk or the bucket it is all the same when a process dies.
            different = [f for f in different if f not in (CRASH, POWER_LOSS) or self._is_new(left(f), 1)]
        taken = self._fork(1 + len(different), different)
        if not taken:
            return None
        self._left -= 1
        if self._depth == len(self._path):
            self.tried[different[taken - 1]] += 1
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
        if not self._is_new(state):
            raise Pruned

    def _is_new(self, state: Hashable, spent: int = 0) -> bool:
        """False where everything that may follow was tried already; ``spent`` faults will have happened there."""
        left, asleep = self._left - spent, frozenset(self._asleep)
        seen = self._seen.setdefault(state, [])
        if any(more >= left and others <= asleep for more, others in seen):
            return False
        seen.append((left, asleep))
        return True

    def _require_progress(self, state: Hashable, *, alone: bool) -> None:
        """Raises ``Pruned`` as ``require_new`` does, and ``Violation`` where a process that nobody could help has come
        back, undisturbed, to where it was: it would go round like that for ever."""
        if (state, self._left) in self._passed and alone:
            raise Violation("a process tries the same again and again, though nothing disturbs it any more")
        self._passed.add((state, self._left))
        if self._depth == len(self._path):
            self.require_new(state)

    def _fork(self, limit: int, faults: Sequence[str] = ()) -> int:
        if self._depth == len(self._path):
            self._path.append(_Fork(limit, faults))
        fork = self._path[self._depth]
        assert (fork.limit, fork.faults) == (limit, faults), "the simulation is not deterministic"
        self._depth += 1
        return fork.taken


@dataclass(frozen=True)
class Exploration:
    """``runs`` were made to their end, ``pruned`` were given up because another run shows the same. ``faults`` counts
    the places where each was tried.
    """

    runs: int
    pruned: int
    steps: int
    seconds: float
    faults: Mapping[str, int]


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
    return Exploration(runs, pruned, steps, round(time.monotonic() - begun, 3), dict(sorted(choices.tried.items())))
