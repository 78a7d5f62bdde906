"""A store behind a slow link, for benchmarks on a fast machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from dcr_s3.store.base import Store
from dcr_s3.store.wrapped import Request, WrappedStore

R = TypeVar("R")


class Link:
    """One direction of a link: whoever sends, bytes pass one after the other at ``bytes_per_s``."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def reserve(self, size_bytes: int, now: float) -> float:
        """The time at which ``size_bytes`` handed over at ``now`` have passed, all in seconds of one clock."""
        with self._lock:
            self._free_at = max(self._free_at, now) + size_bytes / self._bytes_per_s
            return self._free_at


class ThrottledStore(WrappedStore):
    """Every request takes ``latency_s`` and its body's time on the link, of which each direction has one, shared by all
    threads. A body goes up before the store has it and is read before it comes down."""

    def __init__(
        self,
        inner: Store,
        *,
        bytes_per_s: float,
        latency_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._latency_s = latency_s
        self._up = Link(bytes_per_s)
        self._down = Link(bytes_per_s)
        self._clock = clock
        self._sleep = sleep

    def around(self, request: Request, send: Callable[[Request], R]) -> R:
        self._sleep_until(self._up.reserve(request.up_bytes, self._clock()) + self._latency_s)
        started = self._clock()
        result = send(request)
        self._sleep_until(self._down.reserve(request.down_bytes(result), started))
        return result

    def _sleep_until(self, moment: float) -> None:
        wait_s = moment - self._clock()
        if wait_s > 0:
            self._sleep(wait_s)
