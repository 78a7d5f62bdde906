"""The scenarios that are run: long ones from seeds, tiny ones exhaustively."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from dcr_s3.format.keys import ACK_PREFIX, RUN_KEY
from dcr_s3.format.signature import SharedSecret
from dcr_s3.testing.sim.actors import Actor, Kind
from dcr_s3.testing.sim.choices import SeededChoices
from dcr_s3.testing.sim.explorer import Exploration, ExploringChoices, explore
from dcr_s3.testing.sim.job import Job, Rank, Releaser
from dcr_s3.testing.sim.model import ONE, TinyModel
from dcr_s3.testing.sim.programs import (
    Follower,
    Keeper,
    OneCleaning,
    OnePull,
    OneUpkeep,
    Preparation,
    Puller,
    SmallParts,
    SmallSegments,
    Trainer,
)
from dcr_s3.testing.sim.scenario import Result, Role, Scenario

BASELINE = "state/*/baseline"
MIRROR = "mirror"
STATES = 6
NOISY_STEPS = 1500
JOINT_STEPS = 4000
FAULT_RATE = 0.05
QUICK_S, SLOW_S = 10.0, 4000.0
TINY_STEPS = 3000
RECEIVER = "receiver-"
_SIGNER = SharedSecret(b"a secret that all in a simulation know")
_RAM = Path("/dev/shm")


def _directory() -> TemporaryDirectory[str]:
    """In RAM where the system has room for files there: nothing of it is kept, and all of it is written often."""
    return TemporaryDirectory(prefix="dcr-sim-", dir=_RAM if _RAM.is_dir() else None)


@contextmanager
def long_scenario(seed: int, menu: Collection[str] | None = None, fault_rate: float = FAULT_RATE) -> Iterator[Scenario]:
    """Two senders that take the run from each other, a receiver that pulls and one that follows, several versions, and
    for a long while all faults there are, or those of ``menu``; ``fault_rate`` is how likely one is at a request.

    Odd seeds have one sender, and two machines that fold, make snapshots and delete, over so long a time that there is
    something to delete. Of four seeds in a row two upload segments in parts, and of six the last three sign everything.
    """
    with _directory() as directory:
        root = Path(directory)
        upkeep = seed % 2 == 1
        pace_s = SLOW_S if upkeep else QUICK_S
        opens = SmallParts if seed % 4 >= 2 else SmallSegments
        trainers = [Trainer(STATES - n, pace_s=pace_s, opens=opens) for n in (1, 2)][: 1 if upkeep else 2]

        def finished() -> bool:
            return all(t.done for t in trainers)

        roles = [Role(name, trainer, BASELINE) for name, trainer in zip(("alice", "bob"), trainers, strict=False)]
        roles += [Role("carol", Puller(finished, pace_s), MIRROR), Role("dave", Follower(finished, pace_s / 5), MIRROR)]
        roles += [Role(name, Keeper(finished, pace_s / 4), MIRROR) for name in ("erin", "frank") if upkeep]
        model = TinyModel(root / "model", STATES)
        choices = SeededChoices(seed, fault_rate)
        signer = _SIGNER if seed % 6 >= 3 else None
        yield Scenario(
            root / "run", model, roles, choices, seed=seed, noisy_steps=NOISY_STEPS, menu=menu, signer=signer
        )


@contextmanager
def joint_scenario(
    seed: int, menu: Collection[str] | None = None, fault_rate: float = FAULT_RATE
) -> Iterator[Scenario]:
    """A trainer of two ranks, a receiver whose proof a release needs, one that follows what is released, one that
    follows everything, and two machines that release at once. Everything is signed.
    """
    with _directory() as directory:
        root = Path(directory)
        job = Job(STATES - 1, 2, root / "run" / "rank-0" / "state")

        def published() -> bool:
            return job.done

        def finished() -> bool:
            return job.done and scenario.truth.released == scenario.truth.newest

        follower = Follower(finished, QUICK_S / 5, released_only=True)
        roles = [
            Role("rank-0", Rank(job, 0, QUICK_S), BASELINE),
            Role("rank-1", Rank(job, 1, QUICK_S), ""),
            Role("carol", Puller(finished, QUICK_S), MIRROR, required=True),
            Role("dave", follower, MIRROR, cautious=True),
            Role("gina", Follower(finished, QUICK_S / 5), MIRROR),
            Role("erin", Releaser(published, ("carol",), QUICK_S), ""),
            Role("frank", Releaser(published, ("carol",), QUICK_S), ""),
        ]
        model, choices = TinyModel(root / "model", STATES), SeededChoices(seed, fault_rate)
        scenario = Scenario(
            root / "run", model, roles, choices, seed=seed, noisy_steps=JOINT_STEPS, menu=menu, signer=_SIGNER
        )
        yield scenario


Making = Callable[[int, Collection[str] | None, float], AbstractContextManager[Scenario]]


def run_seed(
    seed: int, menu: Collection[str] | None = None, fault_rate: float = FAULT_RATE, *, make: Making = long_scenario
) -> Result:
    """One long run. Raises ``Violation``."""
    with make(seed, menu, fault_rate) as scenario:
        return scenario.run()


@dataclass(frozen=True)
class Tiny:
    """A small scenario. ``earlier`` versions were published before, after all mirrors had been made.

    ``senders`` publish one version each (``fence``: after a fence), ``receivers`` pull once meanwhile and once after,
    ``keepers`` fold and make a snapshot, ``cleaners`` delete what is not needed. ``faults`` may happen in a run, of the
    kinds in ``menu`` (None: all); without ``disk`` only at requests. With ``parts`` segments go up in several parts.
    """

    senders: int = 1
    receivers: int = 1
    faults: int = 1
    fence: bool = False
    menu: Collection[str] | None = None
    disk: bool = True
    parts: bool = False
    keepers: int = 0
    cleaners: int = 0
    earlier: int = 0

    def roles(self) -> list[Role]:
        """Fresh ones for one run."""
        opens = SmallParts if self.parts else SmallSegments
        trainers = [Trainer(1, fence=self.fence, opens=opens) for _ in range(self.senders)]
        senders = [Role(f"sender-{n}", trainer, BASELINE) for n, trainer in enumerate(trainers)]
        receivers = [Role(f"{RECEIVER}{n}", OnePull(), MIRROR, OnePull(last=True)) for n in range(self.receivers)]
        keepers = [Role(f"keeper-{n}", OneUpkeep(), MIRROR) for n in range(self.keepers)]
        cleaners = [Role(f"cleaner-{n}", OneCleaning(), "") for n in range(self.cleaners)]
        return senders + receivers + keepers + cleaners

    def preparations(self) -> list[Role]:
        """What has happened before: the run exists, and so do all mirrors."""
        earlier = Trainer(self.earlier, fence=False)
        creator = Role("creator", Preparation(), BASELINE, earlier if self.earlier else None)
        senders = [Role(f"sender-{n}", Preparation(), BASELINE) for n in range(self.senders)]
        receivers = [Role(f"{RECEIVER}{n}", OnePull(), MIRROR) for n in range(self.receivers)]
        keepers = [Role(f"keeper-{n}", OnePull(), MIRROR) for n in range(self.keepers)]
        return [creator, *senders, *receivers, *keepers]


def explore_tiny(tiny: Tiny, *, begins: Callable[[Scenario], None] = lambda _: None) -> Exploration:
    """Every run of a small scenario. Raises ``Violation``. ``begins`` is told of every run."""
    with _directory() as directory:
        root = Path(directory)
        model = TinyModel(root / "model", 4, ONE)
        calm = SeededChoices(0, budget=0)
        before = Scenario(root / "before", model, tiny.preparations(), calm, noisy_steps=0)
        before.run()
        start = before.capture()

        def make(choices: ExploringChoices) -> Scenario:
            scenario = Scenario(
                root / "run",
                model,
                tiny.roles(),
                choices,
                noisy_steps=TINY_STEPS,
                menu=tiny.menu,
                disk=tiny.disk,
                start=start,
            )
            begins(scenario)
            return scenario

        return explore(make, ExploringChoices(tiny.faults, _private))


def _private(actor: Actor, others: Sequence[Actor]) -> bool:
    """The run's table never changes, nobody here reads acknowledgements, and receivers write nothing else: who reads
    while only receivers are about may do so at any time.
    """
    point = actor.next
    if point is None or point.kind is not Kind.REQUEST or point.key == RUN_KEY or point.key.startswith(ACK_PREFIX):
        return True
    return not point.writes and all(other.name.startswith(RECEIVER) for other in others)
