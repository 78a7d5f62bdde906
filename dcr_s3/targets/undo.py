"""The bits that cells had before they were overwritten, so that an earlier state can be rebuilt piece by piece."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dcr_s3.delta import Changes
from dcr_s3.format.cells import Cells
from dcr_s3.format.region import Region, split_positions
from dcr_s3.targets.disk import disk_errors
from dcr_s3.world import world


class _Entry(NamedTuple):
    """Old bits of ``cells`` cells between ``low`` and ``high``, at ``offset`` in the file: places, then bits."""

    offset: int
    cells: int
    low: int
    high: int
    place_bytes: int
    cell_bytes: int


class UndoLog:
    """Old bits in a file, oldest first; an index of a few words per block and tensor in memory.

    Recording may be called from several threads, but all of one version before any of the next.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._entries: dict[int, list[_Entry]] = defaultdict(list)
        self._at = 0
        self._raw: npt.NDArray[np.uint8] | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        with disk_errors(path):
            self._file = path.open("wb")

    def record(self, regions: Sequence[Region], changes: Changes) -> None:
        """Keeps the old bits of a block's changed cells. Raises ``DiskFull`` where they do not fit."""
        for region, span, first in split_positions(regions, changes.positions):
            places = region.canonical(changes.positions[span] - np.uint32(first))
            old = changes.old[span]
            if not region.is_run:
                order = np.argsort(places)
                places, old = places[order], old[order]
            self._append(region.tensor, places, old)

    def _append(self, tensor: int, places: npt.NDArray[np.uint64], old: Cells) -> None:
        low, high = int(places[0]), int(places[-1])
        width = 4 if high - low < (1 << 32) - 1 else 8
        relative = (places - np.uint64(low)).astype(f"<u{width}")
        with self._lock, disk_errors(self.path):
            self._entries[tensor].append(_Entry(self._at, len(places), low, high, width, old.itemsize))
            self._file.write(relative.data.cast("B"))
            self._file.write(np.ascontiguousarray(old).data.cast("B"))
            self._at += len(places) * (width + old.itemsize)

    def touched(self, tensor: int, start: int, end: int) -> bool:
        """True if a cell from ``start`` to before ``end`` may have been overwritten."""
        return any(e.low < end and e.high >= start for e in self._entries.get(tensor, ()))

    def restore(self, tensor: int, start: int, cells: Cells) -> None:
        """Overwrites ``cells``, which begin at canonical cell ``start`` of a tensor, with the oldest bits known."""
        end = start + len(cells)
        for entry in reversed(self._entries.get(tensor, [])):
            if entry.low < end and entry.high >= start:
                places, old = self._read(entry)
                bounds = np.array([max(start - entry.low, 0), min(end, entry.high + 1) - entry.low], places.dtype)
                first, last = np.searchsorted(places, bounds)
                cells[places[first:last].astype(np.int64) + (entry.low - start)] = old[first:last]

    def _read(self, entry: _Entry) -> tuple[npt.NDArray[np.unsignedinteger], Cells]:
        middle = entry.offset + entry.cells * entry.place_bytes
        raw = self._mapped()
        places = raw[entry.offset : middle].view(f"<u{entry.place_bytes}")
        return places, raw[middle : middle + entry.cells * entry.cell_bytes].view(f"<u{entry.cell_bytes}")

    def _mapped(self) -> npt.NDArray[np.uint8]:
        with self._lock:
            if self._raw is None or self._raw.size != self._at:
                self._file.flush()
                self._raw = np.memmap(self.path, np.uint8, "r")
            return self._raw

    def close(self) -> None:
        """Deletes the file."""
        self._raw = None
        self._file.close()
        world().unlink(self.path)
