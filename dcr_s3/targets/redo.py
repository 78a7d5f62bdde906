"""Redo files: decoded changes as absolute values, so that applying them may be repeated after any interruption.

Local to one machine and one release; little-endian; never on a bucket.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dcr_s3.delta import apply_changes
from dcr_s3.errors import CorruptObject
from dcr_s3.format.cells import Cells
from dcr_s3.format.region import Region, pack_regions, split_positions, unpack_regions
from dcr_s3.targets.disk import disk_errors
from dcr_s3.world import world

_RECORD = struct.Struct("<4sIIIIIQ")
_MAGIC = b"REDO"

NOTE_SUFFIX = ".staged"
"""Instead of ``.redo``: a note that keeps a redo file which no mirror's state names."""


@dataclass(frozen=True)
class RedoRecord:
    """The changed cells of one block: ``positions`` (uint32) count along ``regions``, ``values`` are the new bits."""

    regions: tuple[Region, ...]
    positions: npt.NDArray[np.uint32]
    values: Cells


class RedoWriter:
    """Appends records to one file; may be called from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size_bytes = 0
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        with disk_errors(path):
            self._file = path.open("wb")

    def append(self, record: RedoRecord) -> None:
        """Raises ``DiskFull`` where the record does not fit."""
        regions = pack_regions(record.regions)
        positions = np.ascontiguousarray(record.positions, "<u4").data.cast("B")
        values = np.ascontiguousarray(record.values).data.cast("B")
        body = (regions, positions, values)
        size = sum(len(part) for part in body)
        fields = (len(record.regions), len(regions), record.positions.size, record.values.itemsize)
        crc = _checksum(fields, size, *body)
        with self._lock, disk_errors(self.path):
            for part in (_RECORD.pack(_MAGIC, *fields, crc, size), *body):
                self._file.write(part)
            self.size_bytes += _RECORD.size + size

    def flush(self) -> None:
        """Gives the file to the system, so that it outlives the process, though perhaps not the machine."""
        with self._lock, disk_errors(self.path):
            self._file.flush()

    def close(self) -> None:
        """Makes the file durable."""
        with self._lock, disk_errors(self.path):
            if not self._file.closed:
                world().sync(self._file)
                self._file.close()

    def discard(self) -> None:
        """Drops the file."""
        with self._lock:
            try:
                self._file.close()
            except OSError:
                pass  # what could not be written is not wanted any more
            world().unlink(self.path)


def _checksum(fields: Sequence[int], size: int, *body: bytes | memoryview) -> int:
    """CRC-32 of a record's fields, size and body."""
    crc = zlib.crc32(struct.pack("<4IQ", *fields, size))
    for part in body:
        crc = zlib.crc32(part, crc)
    return crc


class Journal(Protocol):
    """What makes a change of version repeatable: a redo file, or a whole state in a directory."""

    path: Path

    def close(self) -> None:
        """Makes it durable."""

    def discard(self) -> None:
        """Drops it."""


class RedoFile:
    """A redo file that an earlier process finished."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size_bytes = path.stat().st_size if path.is_file() else -1

    def close(self) -> None:
        """Makes the file durable."""
        with disk_errors(self.path), self.path.open("rb") as handle:
            world().sync(handle)

    def discard(self) -> None:
        """Drops the file."""
        world().unlink(self.path)


class StateJournal:
    """A checkpoint directory whose cells replace all others."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def close(self) -> None:
        """Makes the files durable."""
        with disk_errors(self.path):
            for file in sorted(self.path.iterdir()):
                with file.open("rb") as handle:
                    world().sync(handle)
            world().sync_directory(self.path)

    def discard(self) -> None:
        """Drops the directory."""
        remove_directory(self.path)


def remove_directory(path: Path) -> None:
    """Deletes a directory of plain files."""
    if path.is_dir():
        for file in sorted(path.iterdir()):
            world().unlink(file)
        path.rmdir()


def read_redo(path: Path) -> Iterator[RedoRecord]:
    """The records of a file, mapped, not copied. Raises ``CorruptObject`` for a damaged one."""
    if path.stat().st_size == 0:
        return
    raw: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, "r")
    at = 0
    while at < raw.size:
        if at + _RECORD.size > raw.size:
            raise CorruptObject(f"{path}: truncated")
        magic, *fields, crc, size = _RECORD.unpack(raw[at : at + _RECORD.size].tobytes())
        count, region_bytes, changed, width = fields
        at += _RECORD.size
        body = raw[at : at + size]
        at += size
        if magic != _MAGIC or body.size != size or _checksum(fields, size, body.data) != crc:
            raise CorruptObject(f"{path}: damaged; delete the directory's .dcr folder and pull again from a base")
        regions, _ = unpack_regions(body[:region_bytes].tobytes(), 0, count)
        positions = body[region_bytes : region_bytes + 4 * changed].view("<u4")
        yield RedoRecord(regions, positions, body[region_bytes + 4 * changed :].view(f"<u{width}"))


def apply_record(record: RedoRecord, copies: Callable[[int], Sequence[Cells]]) -> None:
    """Overwrites the changed cells. ``copies(tensor)`` gives the flat cells of each place that stores a tensor."""
    if all(r.is_run and len(copies(r.tensor)) == 1 for r in record.regions):
        apply_changes([r.gather(copies(r.tensor)[0]) for r in record.regions], record.positions, record.values)
        return
    for region, span, first in split_positions(record.regions, record.positions):
        index = region.canonical(record.positions[span] - np.uint32(first))
        for cells in copies(region.tensor):
            cells[index] = record.values[span]
