"""Staged cells on their way into engine memory: one call for many storages in host memory, one each on a device."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch

from dcr_s3.delta import Places
from dcr_s3.errors import StateMismatch
from dcr_s3.format.cells import Cells
from dcr_s3.targets.placement import Indices
from dcr_s3.targets.storages import Storage, device_cells, host


class Part(NamedTuple):
    """New cells of canonical tensor ``name`` at ``places`` of an engine storage, and, where known, those there now."""

    name: str
    places: Indices
    new: Cells
    old: Cells | None = None


class Scatter(Protocol):
    """New cells for some places, and the old ones."""

    @property
    def size(self) -> int:
        """How many cells."""

    def write(self) -> None:
        """Writes the new cells."""

    def undo(self) -> None:
        """Writes the old cells."""

    def check(self) -> None:
        """Reads back. Raises ``StateMismatch`` naming an engine tensor that does not hold the new cells."""


@dataclass
class HostScatter:
    """For storages of one width in host memory; ``ends`` counts the places up to the end of each storage."""

    storages: list[Storage]
    ends: list[int]
    places: Places
    new: Cells
    old: Cells

    @property
    def size(self) -> int:
        return self.places.size

    def write(self) -> None:
        self.places.put(self.new)

    def undo(self) -> None:
        self.places.put(self.old)

    def check(self) -> None:
        found = self.places.first_other(self.new)
        if found is not None:
            name = self.storages[bisect_right(self.ends, found)].names[0]
            raise StateMismatch(f"engine tensor {name}: does not hold what was written to it")


@dataclass
class DeviceScatter:
    """For one storage on a device, where ``places`` (int64), ``new`` and ``old`` are staged too."""

    storage: Storage
    places: torch.Tensor
    new: torch.Tensor
    old: torch.Tensor

    @property
    def size(self) -> int:
        return self.places.numel()

    def write(self) -> None:
        self.storage.cells.scatter_(0, self.places, self.new)

    def undo(self) -> None:
        self.storage.cells.scatter_(0, self.places, self.old)

    def check(self) -> None:
        if not torch.equal(self.storage.cells.gather(0, self.places), self.new):
            raise StateMismatch(f"engine tensor {self.storage.names[0]}: does not hold what was written to it")


def make_scatters(storages: Sequence[Storage], parts: Mapping[int, Sequence[Part]]) -> Iterator[Scatter]:
    """From parts by storage number. The old cells are read from the engine.

    Raises ``StateMismatch`` where they are not what a part says: something else wrote there, or the placement is wrong.
    """
    by_width: dict[int, list[int]] = {}
    for number, found in parts.items():
        storage = storages[number]
        if storage.cells.device.type == "cpu":
            by_width.setdefault(storage.cells.element_size(), []).append(number)
            continue
        joined = _Joined(found)
        on_device = torch.from_numpy(joined.places).to(storage.cells.device)
        old = storage.cells[on_device]
        joined.check(host(old))
        yield DeviceScatter(storage, on_device, device_cells(joined.new, storage.cells), old)
    for numbers in by_width.values():
        numbers.sort(key=lambda n: storages[n].cells.data_ptr())
        yield _host_scatter([storages[n] for n in numbers], [_Joined(parts[n]) for n in numbers])


class _Joined:
    """All parts of one storage, in the order of its cells."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._order: Indices | None = None
        self.places = np.concatenate([p.places for p in parts]) if len(parts) > 1 else parts[0].places
        self.new = np.concatenate([p.new for p in parts]) if len(parts) > 1 else parts[0].new
        if self.places.size > 1 and not bool((self.places[1:] > self.places[:-1]).all()):
            self._order = np.argsort(self.places, kind="stable")
            self.places, self.new = self.places[self._order], self.new[self._order]

    def check(self, held: Cells) -> None:
        """Raises ``StateMismatch`` unless these are the parts' old cells."""
        if self._order is not None:
            unordered = np.empty_like(held)
            unordered[self._order] = held
            held = unordered
        start = 0
        for part in self._parts:
            end = start + part.places.size
            if part.old is not None and not np.array_equal(held[start:end], part.old):
                raise StateMismatch(
                    f"tensor {part.name}: the engine does not hold the bits of the version it is at; something else "
                    "wrote to it. Load it anew"
                )
            start = end


def _host_scatter(storages: list[Storage], joined: Sequence[_Joined]) -> HostScatter:
    cells = [host(storage.cells) for storage in storages]
    starts = accumulate((one.size for one in cells), initial=0)
    positions = np.concatenate([one.places + start for one, start in zip(joined, starts, strict=False)])
    ends = list(accumulate(one.places.size for one in joined))
    places = Places(cells, positions)
    old = places.take()
    for one, start, end in zip(joined, [0, *ends], ends, strict=False):
        one.check(old[start:end])
    return HostScatter(storages, ends, places, np.concatenate([one.new for one in joined]), old)
