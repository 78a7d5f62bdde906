"""Staged cells on their way into engine memory: one call for many storages in host memory, one each on a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from dcr_s3.delta import apply_changes
from dcr_s3.errors import StateMismatch
from dcr_s3.format.cells import Cells
from dcr_s3.targets.placement import Indices
from dcr_s3.targets.storages import Storage, device_cells, host

_POSITIONS = 1 << 32


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
    """For storages of one width in host memory: ``positions`` (uint32, ascending) count along their ``cells``, one
    storage after the other.
    """

    storages: list[Storage]
    cells: list[Cells]
    positions: npt.NDArray[np.uint32]
    new: Cells
    old: Cells

    @property
    def size(self) -> int:
        return self.positions.size

    def write(self) -> None:
        apply_changes(self.cells, self.positions, self.new)

    def undo(self) -> None:
        apply_changes(self.cells, self.positions, self.old)

    def check(self) -> None:
        ends = np.cumsum([cells.size for cells in self.cells])
        cuts = [0, *np.searchsorted(self.positions, ends).tolist()]
        for number, (cells, end) in enumerate(zip(self.cells, ends.tolist(), strict=True)):
            span = slice(cuts[number], cuts[number + 1])
            places = self.positions[span].astype(np.int64) - (end - cells.size)
            if not np.array_equal(cells[places], self.new[span]):
                name = self.storages[number].names[0]
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


def make_scatters(
    storages: Sequence[Storage], parts: Mapping[int, Sequence[tuple[Indices, Cells]]]
) -> Iterator[Scatter]:
    """From (places, new cells) per storage number. The old cells are read from the engine."""
    by_width: dict[int, list[tuple[Storage, Indices, Cells]]] = {}
    for number, found in parts.items():
        storage = storages[number]
        places, new = (np.concatenate(column) if len(found) > 1 else column[0] for column in zip(*found, strict=True))
        if storage.cells.device.type == "cpu":
            if places.size > 1 and int(np.diff(places).min()) <= 0:
                order = np.argsort(places)
                places, new = places[order], new[order]
            by_width.setdefault(storage.cells.element_size(), []).append((storage, places, new))
        else:
            on_device = torch.from_numpy(places).to(storage.cells.device)
            yield DeviceScatter(storage, on_device, device_cells(new, storage.cells), storage.cells[on_device])
    for found_of_width in by_width.values():
        yield from _host_scatters(found_of_width)


def _host_scatters(found: Sequence[tuple[Storage, Indices, Cells]]) -> Iterator[HostScatter]:
    """Joined as far as 32-bit positions reach."""
    group: list[tuple[Storage, Indices, Cells]] = []
    cells = 0
    for one in found:
        if group and cells + one[0].cells.numel() > _POSITIONS:
            yield _join(group)
            group, cells = [], 0
        group.append(one)
        cells += one[0].cells.numel()
    if group:
        yield _join(group)


def _join(group: Sequence[tuple[Storage, Indices, Cells]]) -> HostScatter:
    cells = [host(storage.cells) for storage, _, _ in group]
    starts = np.cumsum([0, *(one.size for one in cells)]).tolist()
    placed = zip(group, starts, strict=False)
    positions = np.concatenate([(places + start).astype(np.uint32) for (_, places, _), start in placed])
    old = np.concatenate([one[places] for one, (_, places, _) in zip(cells, group, strict=True)])
    new = np.concatenate([values for _, _, values in group])
    return HostScatter([s for s, _, _ in group], cells, positions, new, old)
