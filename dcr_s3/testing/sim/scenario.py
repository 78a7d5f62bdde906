"""A scenario: which processes there are, on which machines; run once from a seed or an explorer's choices."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dcr_s3.format.signature import Signer
from dcr_s3.store.memory import MemoryBucket, MemoryStore
from dcr_s3.store.trusted import trusted
from dcr_s3.testing.sim.choices import Choices
from dcr_s3.testing.sim.disk import SimDisk
from dcr_s3.testing.sim.model import TinyModel
from dcr_s3.testing.sim.programs import PART_BYTES, Program, Surroundings
from dcr_s3.testing.sim.simulation import Machine, Simulation
from dcr_s3.testing.sim.store import SimStore
from dcr_s3.testing.sim.truth import Intent, Mirrored, Truth
from dcr_s3.testing.sim.world import SimWorld
from dcr_s3.world import living_in

RESTART_S = 3.0


@dataclass(frozen=True)
class Role:
    """One machine that always runs the same program, and ``settle`` after all programs have ended.

    ``mirror`` is a pattern for where its mirror lies, empty where it has none; ``required`` and ``cautious`` are as for
    ``Mirrored``.
    """

    name: str
    program: Program
    mirror: str
    settle: Program | None = None
    required: bool = False
    cautious: bool = False


@dataclass(frozen=True)
class Start:
    """What there is before a run: objects of the bucket, files by their path below the scenario's directory, and who
    meant what by the manifests."""

    objects: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    intents: Mapping[str, Intent | None] = field(default_factory=dict)

    def lay_out(self, root: Path) -> None:
        """Leaves these files below ``root``, and nothing else."""
        folders = {root / parent for name in self.files for parent in Path(name).parents}
        for path in sorted(root.rglob("*"), reverse=True):
            if not path.is_dir():
                path.unlink()
            elif path not in folders:
                path.rmdir()
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (root / name).write_bytes(content)


NOTHING = Start()


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    trace: tuple[str, ...]
    trace_hash: str
    steps: int
    versions: int
    crashes: int
    virtual_s: float


class Scenario:
    """Runs roles over one bucket. Everything lies in ``root``, a directory of its own."""

    def __init__(
        self,
        root: Path,
        model: TinyModel,
        roles: Sequence[Role],
        choices: Choices,
        *,
        seed: int = 0,
        noisy_steps: int,
        menu: Collection[str] | None = None,
        disk: bool = True,
        start: Start = NOTHING,
        signer: Signer | None = None,
    ) -> None:
        self._root = root
        self._model = model
        self._roles = list(roles)
        self._menu = menu
        self._disk_menu = menu if disk else ()
        self._signer = signer
        self._lives: dict[str, int] = {}
        self._crashes = 0
        start.lay_out(root)
        self.bucket = MemoryBucket(objects=dict(start.objects), min_part_bytes=PART_BYTES)
        self.machines = {r.name: _machine(root, r.name) for r in roles}
        mirrors = {r.name: Mirrored(self.machines[r.name], r.mirror, r.required, r.cautious) for r in roles if r.mirror}
        self.truth = Truth(self.bucket, model, mirrors)
        self.simulation = Simulation(choices, self.truth.check, noisy_steps, seed=seed)
        self.truth.intents.update(start.intents)
        self.truth.check("")
        self.simulation.outside_state = self._outside_state

    def run(self) -> Result:
        """Until all programs have ended. Raises ``Violation``."""
        simulation = self.simulation
        for role in self._roles:
            self._start(role, role.program)
        simulation.run()
        simulation.choices.ended(simulation.state)
        simulation.calm()
        for role in self._roles:
            if role.settle is not None:
                self._start(role, role.settle)
                simulation.run()
        return Result(
            trace=tuple(simulation.trace),
            trace_hash=simulation.trace_hash,
            steps=simulation.steps,
            versions=self.truth.newest,
            crashes=self._crashes,
            virtual_s=simulation.now_s,
        )

    def capture(self) -> Start:
        """What there is now, for other runs to start from."""
        files = sorted(p for m in self.machines.values() for p in m.root.rglob("*") if p.is_file())
        contents = {str(p.relative_to(self._root)): p.read_bytes() for p in files}
        return Start(dict(self.bucket.objects), contents, dict(self.truth.intents))

    def _outside_state(self, running: Collection[str]) -> Hashable:
        """The bucket, what was promised, and the disks of those that have ended and will be settled."""
        idle = (r.name for r in self._roles if r.settle is not None and r.name not in running)
        return self.truth.state(), tuple((name, self.machines[name].digest()) for name in idle)

    def _start(self, role: Role, program: Program) -> None:
        life = self._lives[role.name] = self._lives.get(role.name, -1) + 1
        simulation, machine = self.simulation, self.machines[role.name]
        world = SimWorld(simulation, machine, simulation.dice(f"{role.name}#{life}"), self._disk_menu)
        here = Surroundings(role.name, MemoryStore(), world, self._model, self.truth, simulation)
        way = SimStore(
            MemoryStore(self.bucket),
            simulation,
            world,
            lambda request: self.truth.sending(here.intent, request),
            self._menu,
        )
        here.store = trusted(way, self._signer)

        def live() -> None:
            with living_in(world):
                program(here)

        world.actor = simulation.spawn(role.name, live, on_death=lambda: self._restart(role))
        world.actor.estate = lambda: program.reached
        if life:
            world.actor.wake_s += RESTART_S

    def _restart(self, role: Role) -> None:
        self._crashes += 1
        self._start(role, role.program)


def _machine(root: Path, name: str) -> Machine:
    directory = root / name
    directory.mkdir(parents=True, exist_ok=True)
    disk = SimDisk(directory)
    disk.settle()
    return Machine(name, disk)
