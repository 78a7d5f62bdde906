"""The simulation: virtual time, whose turn it is, what goes wrong, and the trace of all of it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dcr_s3.testing.sim.actors import Actor, Baton, Crash, Kind, Point
from dcr_s3.testing.sim.choices import CRASH, DEADLY, POWER_LOSS, Choices
from dcr_s3.testing.sim.disk import SimDisk

EPOCH_S = 1_700_000_000.0
MAX_STEPS = 200_000


class Violation(AssertionError):
    """A promise was broken."""


class Pruned(Exception):
    """The explorer has seen all that may follow."""


@dataclass
class Machine:
    """A disk, and the kernel that runs on it."""

    name: str
    disk: SimDisk
    boots: int = 0

    @property
    def root(self) -> Path:
        return self.disk.root

    @property
    def boot_id(self) -> str:
        """Of the running kernel."""
        return self._boot_id(self.boots)

    def digest(self) -> str:
        """Equal for disks that mean the same to the running kernel."""
        return self.disk.digest(self.boot_id)

    def durable_digest(self) -> str:
        """Equal for disks that mean the same to the next one after a power loss that takes all it can."""
        return self.disk.durable_digest(self._boot_id(self.boots + 1))

    def _boot_id(self, boots: int) -> str:
        return f"{self.name}-{boots}"


@dataclass
class Simulation:
    """Drives actors one step at a time. ``check`` is told who did something and raises ``Violation``."""

    choices: Choices
    check: Callable[[str], None]
    noisy_steps: int
    seed: int = 0
    now_s: float = 0.0
    steps: int = 0
    trace: list[str] = field(default_factory=list)
    actors: list[Actor] = field(default_factory=list)
    broken: Violation | None = None
    outside_state: Callable[[Collection[str]], Hashable] = lambda _: None
    """Digests all but running processes, whose names it is given."""
    _baton: Baton = field(default_factory=Baton)

    @property
    def quiet(self) -> bool:
        """True once nothing goes wrong any more."""
        return self.steps >= self.noisy_steps

    def calm(self) -> None:
        """Nothing goes wrong from now on."""
        self.noisy_steps = self.steps

    @property
    def _timeless(self) -> bool:
        return self.choices.timeless and not self.quiet

    def spawn(self, name: str, program: Callable[[], None], on_death: Callable[[], None] = lambda: None) -> Actor:
        """Starts a process; ``on_death`` is called after it has crashed."""
        actor = Actor(name, program, self._baton, on_death)
        actor.wake_s = self.now_s
        self.actors.append(actor)
        return actor

    def run(self, *, until: Callable[[], bool] = lambda: False) -> None:
        """Lets actors take turns until all have ended, or ``until`` says so after a step.

        Raises ``Violation``, or what an actor has raised.
        """
        try:
            while self.actors and not until():
                self._step(self._ready())
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Kills every actor."""
        for actor in self.actors:
            actor.die()
            if not actor.ended:
                self._baton.pass_to(actor)
            actor.join()
        self.actors.clear()

    def _ready(self) -> list[Actor]:
        if not self._timeless:
            self.now_s = max(self.now_s, min(a.wake_s for a in self.actors))
        ready = self.actors if self._timeless else [a for a in self.actors if a.wake_s <= self.now_s]
        # What comes before a process's first request is nobody else's business.
        fresh = [a for a in ready if a.next is None]
        return fresh[:1] or ready

    def _step(self, ready: list[Actor]) -> None:
        fresh = len(ready) == 1 and ready[0].next is None
        actor = ready[0] if fresh or (self.quiet and self.choices.timeless) else self.choices.actor(ready, self.state)
        self._baton.pass_to(actor)
        if actor.ended:
            actor.join()
            self.actors.remove(actor)
            self.log(actor.name, "dies" if actor.dead else "ends")
        if actor.ended and actor.dead:
            actor.on_death()
        if self.broken is not None:
            raise self.broken
        if actor.error is not None:
            if isinstance(actor.error, Violation):
                raise actor.error
            raise Violation(f"{actor.name} breaks down: {actor.error!r}") from actor.error
        self.check(actor.name)

    def state(self) -> Hashable:
        """Equal for two moments from which the same may follow, in a timeless simulation."""
        alive = tuple(sorted((a.name, a.history.hexdigest(), str(a.next)) for a in self.actors))
        return self.outside_state({a.name for a in self.actors}), alive

    def _without(self, gone: Actor, machine: Machine, fault: str) -> Hashable:
        """The same, were one process to die of ``fault`` now."""
        alive = tuple(sorted((a.name, a.history.hexdigest(), str(a.next)) for a in self.actors if a is not gone))
        disk = machine.durable_digest() if fault == POWER_LOSS else machine.digest()
        return self.outside_state({a.name for a in self.actors}), alive, gone.name, gone.estate(), fault, disk

    def at(self, actor: Actor, machine: Machine, point: Point, possible: Sequence[str]) -> str | None:
        """Called by an actor before it does what ``point`` says; returns the fault that it meets. Raises ``Crash``."""
        actor.require_alive()
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise Violation(f"no end after {MAX_STEPS} steps")
        if point.kind is Kind.REQUEST:
            actor.offer(point)
        else:
            self._examine_inside(actor)
        fault = None if self.quiet else self.choices.fault(point, possible, partial(self._without, actor, machine))
        self.log(actor.name, str(point), fault or "")
        actor.learn(str(point))
        if fault in DEADLY:
            actor.die()
            if fault == POWER_LOSS:
                machine.disk.lose_power(self.choices.number)
                machine.boots += 1
            if fault in (CRASH, POWER_LOSS):
                raise Crash
        return fault

    def sleep(self, actor: Actor, seconds: float) -> None:
        """Virtual time passes for one actor."""
        actor.require_alive()
        if self._timeless:
            return
        actor.wake_s = self.now_s + seconds
        actor.offer(Point(Kind.SLEEP, "sleep", f"{seconds:.3f}"))

    def _examine_inside(self, actor: Actor) -> None:
        """Checks from within an actor, whose own code must not get to see the violation."""
        try:
            self.check(actor.name)
        except Violation as violation:
            self.broken = violation
            actor.die()
            raise Crash from None

    def log(self, *words: str) -> None:
        """Adds a line to the trace."""
        self.trace.append(f"{self.now_s:.3f} " + " ".join(w for w in words if w))

    @property
    def trace_hash(self) -> str:
        """SHA-256 over the trace."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()

    def dice(self, name: str) -> random.Random:
        """Chance for one process, the same whatever others do."""
        return random.Random(f"{self.seed}/{name}")
