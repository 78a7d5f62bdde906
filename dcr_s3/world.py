"""What the package takes from its machine besides stores and tensors: time, chance, and the order of disk writes.

A simulator puts a world of its own in place of the real one, for the calling thread alone, and decides all of it.
"""

from __future__ import annotations

import os
import random
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Protocol


class Mapped(Protocol):
    """A mapped file, such as ``numpy.memmap``."""

    def flush(self) -> None:
        """Writes changed pages to disk."""


class World:
    """The real one."""

    def time(self) -> float:
        """Wall clock, seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """A clock that never goes back, seconds since some moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Returns after ``seconds``."""
        time.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Returns once ``event`` is set, or after ``seconds``; says whether it is set."""
        return event.wait(seconds)

    def token(self, size_bytes: int) -> str:
        """Unpredictable bytes in hex, two digits each: nobody else gets the same."""
        return secrets.token_hex(size_bytes)

    def uniform(self, low: float, high: float) -> float:
        """A random number for jitter."""
        return random.uniform(low, high)

    def boot_id(self) -> str:
        """Names the running kernel's boot; empty where the system does not tell."""
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return ""

    def sync(self, file: IO[bytes]) -> None:
        """Makes a file's content durable."""
        file.flush()
        os.fsync(file.fileno())

    def sync_map(self, mapped: Mapped) -> None:
        """Makes a mapped file's content durable."""
        mapped.flush()

    def sync_directory(self, directory: Path) -> None:
        """Makes new, renamed and deleted names in a directory durable."""
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def replace(self, source: Path, target: Path) -> None:
        """Renames, over an existing file too."""
        source.replace(target)

    def unlink(self, path: Path) -> None:
        """Deletes a file; one that is missing is no error."""
        path.unlink(missing_ok=True)

    def reach(self, moment: str) -> None:
        """Called where an interruption would leave something half done. Nothing happens here in the real world."""


_current: ContextVar[World] = ContextVar("world", default=World())  # noqa: B039 - it has no state


def world() -> World:
    """The world of the calling thread."""
    return _current.get()


@contextmanager
def living_in(other: World) -> Iterator[None]:
    """Makes ``other`` the calling thread's world inside the block."""
    token = _current.set(other)
    try:
        yield
    finally:
        _current.reset(token)


def timestamp(timespec: str = "milliseconds") -> str:
    """Now, UTC, in ISO 8601, as documents carry it."""
    return datetime.fromtimestamp(world().time(), UTC).isoformat(timespec=timespec)
