"""The world of one simulated process."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Collection
from pathlib import Path
from typing import IO

from dcr_s3.testing.sim.actors import Actor, Kind, Point
from dcr_s3.testing.sim.choices import CRASH, POWER_LOSS
from dcr_s3.testing.sim.simulation import EPOCH_S, Machine, Simulation
from dcr_s3.world import Mapped, World

DISK_FULL = "disk_full"
_SYNC_FAULTS = (POWER_LOSS,)
"""A killed process leaves the same whether it had synchronised or not."""
_WRITE_FAULTS = (POWER_LOSS, DISK_FULL)
_DISK_FAULTS = (CRASH, POWER_LOSS)


class SimWorld(World):
    """Virtual time, seeded chance, and a disk on which every write may be the last.

    ``menu`` restricts what may happen there; None allows all.
    """

    def __init__(
        self,
        simulation: Simulation,
        machine: Machine,
        dice: random.Random,
        menu: Collection[str] | None = None,
    ) -> None:
        self._menu = menu
        self._simulation = simulation
        self._machine = machine
        self._dice = dice
        self.actor: Actor | None = None

    def time(self) -> float:
        return EPOCH_S + self._simulation.now_s

    def monotonic(self) -> float:
        return self._simulation.now_s

    def sleep(self, seconds: float) -> None:
        self._simulation.sleep(self.me, seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        if not event.is_set():
            self.sleep(seconds)
        return event.is_set()

    def token(self, size_bytes: int) -> str:
        return self._dice.randbytes(size_bytes).hex()

    def uniform(self, low: float, high: float) -> float:
        return self._dice.uniform(low, high)

    def boot_id(self) -> str:
        return self._machine.boot_id

    def sync(self, file: IO[bytes]) -> None:
        path = Path(file.name)
        self._at("sync", path)
        file.flush()
        self._machine.disk.sync(path)

    def sync_map(self, mapped: Mapped) -> None:
        path = Path(str(mapped.filename))  # type: ignore[attr-defined]
        self._at("sync_map", path)
        self._machine.disk.sync(path)

    def sync_directory(self, directory: Path) -> None:
        self._at("sync_directory", directory)
        self._machine.disk.sync_folder(directory)

    def replace(self, source: Path, target: Path) -> None:
        self._at("replace", target)
        # Nobody looks in between, and renaming over a file makes some file systems write to the disk.
        if target.is_file():
            target.unlink()
        source.rename(target)
        self._machine.disk.replace(source, target)

    def unlink(self, path: Path) -> None:
        self._at("unlink", path)
        if path.exists():
            super().unlink(path)
            self._machine.disk.unlink(path)

    def reach(self, moment: str) -> None:
        self._simulation.at(
            self.me, self._machine, Point(Kind.DISK, moment, self._machine.name), self._possible(moment)
        )

    @property
    def me(self) -> Actor:
        """The process that lives here."""
        assert self.actor is not None
        return self.actor

    @property
    def machine(self) -> Machine:
        """What it runs on."""
        return self._machine

    def _at(self, name: str, path: Path) -> None:
        own, shown = f"{self._machine.root}/", str(path)
        shown = shown.removeprefix(own) if shown.startswith(own) else path.name
        point = Point(Kind.DISK, name, f"{self._machine.name}:{shown}")
        if self._simulation.at(self.me, self._machine, point, self._possible(name)) == DISK_FULL:
            self.me.learn(DISK_FULL)
            raise OSError(errno.ENOSPC, "simulated: no space left", str(path))

    def _possible(self, name: str) -> list[str]:
        faults = _WRITE_FAULTS if name == "sync" else _SYNC_FAULTS if name.startswith("sync") else _DISK_FAULTS
        return [f for f in faults if self._menu is None or f in self._menu]
