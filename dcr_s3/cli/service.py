"""Running under systemd: readiness, status, watchdog, and SIGHUP."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from dcr_s3.store import Poller, Store, open_poller
from dcr_s3.store.base import Object
from dcr_s3.store.wrapped import Request, WrappedStore
from dcr_s3.world import world

R = TypeVar("R")


class Notifier:
    """Speaks the service manager's notification protocol; silent where no manager listens (NOTIFY_SOCKET unset)."""

    def __init__(self) -> None:
        self._address = os.environ.get("NOTIFY_SOCKET", "")
        self._every_s = int(os.environ.get("WATCHDOG_USEC", "0")) / 2e6
        self._fed_at = float("-inf")

    def ready(self) -> None:
        """Start-up is over."""
        self._send("READY=1")

    def status(self, text: str) -> None:
        """One line that ``systemctl status`` shows."""
        self._send(f"STATUS={text}")

    def reloading(self) -> None:
        """SIGHUP was received; ``ready`` follows."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={int(world().monotonic() * 1e6)}")

    def stopping(self) -> None:
        """The end has begun."""
        self._send("STOPPING=1")

    def alive(self) -> None:
        """Feeds the watchdog, where one is set; call it whenever work moves on."""
        now = world().monotonic()
        if self._every_s and now - self._fed_at >= self._every_s / 2:
            self._fed_at = now
            self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            try:
                channel.sendto(message.encode(), address)
            except OSError:
                pass  # a manager that is gone has nobody to tell


class WatchedStore(WrappedStore):
    """Calls ``alive`` after every request that came to an end, so that a watchdog sees a follower that is stuck."""

    def __init__(self, inner: Store, alive: Callable[[], None]) -> None:
        super().__init__(inner)
        self._alive = alive

    def around(self, request: Request, send: Callable[[Request], R]) -> R:
        try:
            return send(request)
        finally:
            self._alive()

    def open_poller(self) -> Poller:
        """See :func:`dcr_s3.store.open_poller`."""
        return _WatchedPoller(open_poller(self.inner), self._alive)


class _WatchedPoller:
    def __init__(self, inner: Poller, alive: Callable[[], None]) -> None:
        self._inner = inner
        self._alive = alive

    async def get(self, key: str, *, limit_bytes: int, if_none_match: str | None = None) -> Object | None:
        try:
            return await self._inner.get(key, limit_bytes=limit_bytes, if_none_match=if_none_match)
        finally:
            self._alive()

    async def close(self) -> None:
        await self._inner.close()


@contextmanager
def reload_by_event(stop: threading.Event) -> Iterator[threading.Event]:
    """Inside, SIGHUP sets the event and ``stop`` too, so that the work in hand is finished and begun anew."""
    reload = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        reload.set()
        stop.set()

    before = signal.signal(signal.SIGHUP, ask)
    try:
        yield reload
    finally:
        signal.signal(signal.SIGHUP, before)
