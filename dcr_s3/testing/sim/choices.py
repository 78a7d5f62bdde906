"""Who decides what happens next: a seed, or an explorer that tries everything."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dcr_s3.testing.sim.actors import Actor, Kind, Point


class Choices(Protocol):
    """Asked at every point of a simulation. The same answers give the same run."""

    timeless: bool
    """True where sleeping takes no time, so that only the order of requests is left to decide."""

    def actor(self, ready: Sequence[Actor], state: Callable[[], Hashable]) -> Actor:
        """Whose turn it is. ``state`` digests the whole simulation."""

    def fault(self, point: Point, possible: Sequence[str], left: Callable[[str], Hashable]) -> str | None:
        """What goes wrong with it. ``left`` digests all that there would still be if the process died of it now."""

    def ended(self, state: Callable[[], Hashable]) -> None:
        """All programs have ended; what follows is undisturbed."""

    def number(self, limit: int) -> int:
        """Any number from 0 to ``limit - 1``."""


@dataclass
class SeededChoices:
    """Everything by chance. ``rates`` are the probabilities of faults, of crashes at a request and of crashes at a disk
    write; ``budget`` is how many may still happen."""

    seed: int
    fault_rate: float = 0.05
    crash_rate: float = 0.01
    disk_rate: float = 0.01
    budget: int = 1_000_000
    timeless: bool = False
    _dice: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)

    def actor(self, ready: Sequence[Actor], state: Callable[[], Hashable]) -> Actor:
        return self._dice.choice(ready)

    def fault(self, point: Point, possible: Sequence[str], left: Callable[[str], Hashable]) -> str | None:
        deadly = [f for f in possible if f in DEADLY]
        harmless = [f for f in possible if f not in DEADLY]
        crash_rate = self.disk_rate if point.kind is Kind.DISK else self.crash_rate
        dice = self._dice.random()
        if not self.budget or dice >= crash_rate + self.fault_rate:
            return None
        kinds = deadly if dice < crash_rate else harmless
        self.budget -= bool(kinds)
        return self._dice.choice(kinds) if kinds else None

    def ended(self, state: Callable[[], Hashable]) -> None:
        pass

    def number(self, limit: int) -> int:
        return self._dice.randrange(limit)


CRASH = "crash"
CRASH_LATE = "crash_late"
POWER_LOSS = "power_loss"
DEADLY = (CRASH, CRASH_LATE, POWER_LOSS)
