"""What simulated processes do: they use the package as people do, and try again where it says that they may."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from dcr_s3.errors import CommitConflict, DcrError, Fenced
from dcr_s3.receiver import Receiver
from dcr_s3.retention import gc
from dcr_s3.sender import Sender
from dcr_s3.store.base import Store
from dcr_s3.testing.sim.model import TinyModel
from dcr_s3.testing.sim.simulation import Machine, Simulation, Violation
from dcr_s3.testing.sim.truth import Intent, Truth
from dcr_s3.testing.sim.world import SimWorld
from dcr_s3.upkeep import make_fold, make_snapshot
from dcr_s3.world import world

PATIENCE = 4
"""Errors that a process may still meet after the last fault."""

MIN_AGE_S = 7200.0
"""Longer than any simulated process ever stands still."""


PART_BYTES = 64
"""Small enough for the segments of a tiny model to have several parts."""


class SmallSegments(Sender):
    """Tiny models have several segments too."""

    least_segment_bytes = 1


class SmallParts(SmallSegments):
    """And their segments several parts."""

    part_bytes = PART_BYTES


@dataclass
class Surroundings:
    """What a process knows: its own machine and way to the bucket; and what only the simulation knows."""

    name: str
    store: Store
    world: SimWorld
    model: TinyModel
    truth: Truth
    simulation: Simulation
    intent: Intent | None = None
    _late_errors: int = 0

    @property
    def machine(self) -> Machine:
        """What it runs on."""
        return self.world.machine

    def begin(self, *memory: object) -> None:
        """From here on a process knows no more than ``memory`` and what lies on its disk."""
        if self.simulation.choices.timeless:
            self.world.me.begin_anew(*memory, self.machine.digest())

    def trouble(self, error: DcrError) -> None:
        """Notes an error and waits. Raises ``Violation`` if there are still errors long after the last fault."""
        self.simulation.log(self.name, "sees", type(error).__name__)
        self._late_errors += self.simulation.quiet
        if self._late_errors > PATIENCE:
            raise Violation(f"{self.name} does not recover: {type(error).__name__}: {error}") from error
        world().sleep(5.0)


class Program(ABC):
    """What a machine runs, again from the beginning after every crash."""

    reached = 0
    """All that a new process takes over from the one before, besides its disk."""

    @abstractmethod
    def __call__(self, here: Surroundings) -> None:
        """Runs until its work is done. Raises ``Violation``."""


@dataclass
class Trainer(Program):
    """Publishes states in their order. A new process goes on where the last one was, or one state before.

    Without ``fence`` it is opened anew for every state, as a one-shot publisher.
    """

    states: int
    fence: bool = True
    pace_s: float = 10.0
    opens: type[Sender] = SmallSegments
    reached: int = 0
    done: bool = False

    def __call__(self, here: Surroundings) -> None:
        self.reached = max(0, self.reached - 1)
        while not self.done:
            here.begin(self.reached)
            try:
                self._session(here)
            except Fenced:
                self.done = True
            except DcrError as error:
                here.trouble(error)

    def _session(self, here: Surroundings) -> None:
        base, state_dir = here.model.directory(0), here.machine.root / "state"
        here.intent = None
        with self.opens.open(here.store, base=base, state_dir=state_dir, fence=self.fence, workers=0) as sender:
            session = here.truth.opened(sender.position.version) if self.fence else None
            while self.reached < self.states:
                here.intent = Intent(here.name, (self.reached + 1) % len(here.model.files), session)
                self._publish(here, sender, here.intent)
                self.reached += 1
                world().sleep(world().uniform(0.0, self.pace_s))
                if not self.fence:
                    break
        self.done = self.reached == self.states

    @staticmethod
    def _publish(here: Surroundings, sender: Sender, intent: Intent) -> None:
        try:
            report = sender.publish(here.model.directory(intent.state), step=intent.state)
        except (CommitConflict, Fenced):
            here.truth.lost(intent)
            raise
        here.truth.published(intent, report.version)


class Preparation(Program):
    """Creates the run and a baseline."""

    def __call__(self, here: Surroundings) -> None:
        base, state_dir = here.model.directory(0), here.machine.root / "state"
        SmallSegments.open(here.store, base=base, state_dir=state_dir, fence=False, workers=0).close()


@dataclass
class Puller(Program):
    """Pulls again and again, as from cron, until ``finished`` says that there will be nothing more."""

    finished: Callable[[], bool]
    pace_s: float = 10.0

    def __call__(self, here: Surroundings) -> None:
        base, target = here.model.directory(0), here.machine.root / "mirror"
        while not (self.finished() and here.truth.at_newest(here.name)):
            try:
                Receiver(here.store, target, base=base, name=here.name, workers=0).pull()
            except DcrError as error:
                here.trouble(error)
            world().sleep(world().uniform(0.0, self.pace_s))


@dataclass
class OnePull(Program):
    """Pulls, and tries again until that has worked. ``last``: no version may be missing then."""

    last: bool = False

    def __call__(self, here: Surroundings) -> None:
        base, target = here.model.directory(0), here.machine.root / "mirror"
        while True:
            here.begin()
            try:
                Receiver(here.store, target, base=base, name=here.name, workers=0).pull()
                break
            except DcrError as error:
                here.trouble(error)
        if self.last and not here.truth.at_newest(here.name):
            raise Violation(f"{here.name} has pulled undisturbed and does not hold version {here.truth.newest}")


@dataclass
class Follower(Program):
    """Follows, fetching ahead; starts anew after an error."""

    finished: Callable[[], bool]
    poll_s: float = 2.0
    released_only: bool = False

    def __call__(self, here: Surroundings) -> None:
        base, target = here.model.directory(0), here.machine.root / "mirror"
        halt = _Halt(lambda: self.finished() and here.truth.at_newest(here.name))
        while not halt.is_set():
            try:
                receiver = Receiver(
                    here.store, target, base=base, name=here.name, released_only=self.released_only, workers=0
                )
                receiver.follow(stop=halt, poll_interval_s=self.poll_s)
            except DcrError as error:
                here.trouble(error)


@dataclass
class Keeper(Program):
    """Now and then folds, or makes a snapshot, or deletes what is not needed."""

    finished: Callable[[], bool]
    pace_s: float = 4000.0

    def __call__(self, here: Surroundings) -> None:
        base, mirror = here.model.directory(0), here.machine.root / "mirror"
        while not self.finished():
            world().sleep(world().uniform(0.0, self.pace_s))
            task = int(world().uniform(0.0, 3.0))
            try:
                if task == 0:
                    make_fold(here.store, mirror, base=base, workers=0)
                elif task == 1:
                    Receiver(here.store, mirror, base=base, name=here.name, workers=0).pull()
                    make_snapshot(here.store, mirror, workers=0)
                else:
                    gc(here.store, min_age_s=MIN_AGE_S, keep_versions=1, dry_run=False, workers=0)
            except DcrError as error:
                here.trouble(error)


class OneUpkeep(Program):
    """Folds and makes a snapshot, and tries again until that has worked."""

    def __call__(self, here: Surroundings) -> None:
        mirror = here.machine.root / "mirror"
        while True:
            here.begin()
            try:
                make_fold(here.store, mirror, workers=0)
                make_snapshot(here.store, mirror, workers=0)
                return
            except DcrError as error:
                here.trouble(error)


class OneCleaning(Program):
    """Deletes what is not needed, and tries again until that has worked."""

    def __call__(self, here: Surroundings) -> None:
        while True:
            here.begin()
            try:
                gc(here.store, min_age_s=MIN_AGE_S, keep_versions=1, dry_run=False, workers=0)
                return
            except DcrError as error:
                here.trouble(error)


class _Halt(threading.Event):
    """Set once a condition holds."""

    def __init__(self, reached: Callable[[], bool]) -> None:
        super().__init__()
        self._reached = reached

    def is_set(self) -> bool:
        return self._reached()
