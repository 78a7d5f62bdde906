"""How many requests a store answered and how many bytes they moved."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from dcr_s3.store.base import Object, Poller, Store
from dcr_s3.store.poller import open_poller
from dcr_s3.store.wrapped import Request, WrappedStore

R = TypeVar("R")


@dataclass(frozen=True)
class Traffic:
    """Requests by kind, and bytes of bodies each way. Headers, and a client's own repeats, are not in it."""

    requests: Counter[str] = field(default_factory=Counter)
    up_bytes: int = 0
    down_bytes: int = 0

    @property
    def total_requests(self) -> int:
        return self.requests.total()

    def __sub__(self, earlier: Traffic) -> Traffic:
        """What happened since ``earlier``."""
        return Traffic(
            self.requests - earlier.requests,
            self.up_bytes - earlier.up_bytes,
            self.down_bytes - earlier.down_bytes,
        )


class Meter:
    """Adds up traffic from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traffic = Traffic()

    def add(self, *, kind: str | None = None, up_bytes: int = 0, down_bytes: int = 0) -> None:
        """Counts one request if ``kind`` is given, and bytes."""
        with self._lock:
            before = self._traffic
            requests = before.requests if kind is None else before.requests + Counter([kind])
            self._traffic = Traffic(requests, before.up_bytes + up_bytes, before.down_bytes + down_bytes)

    @property
    def traffic(self) -> Traffic:
        """Everything so far."""
        with self._lock:
            return self._traffic


class MeteredStore(WrappedStore):
    """Counts what goes through it and the pollers opened on it. A request counts whatever its outcome."""

    def __init__(self, inner: Store, meter: Meter | None = None) -> None:
        super().__init__(inner)
        self.meter = meter or Meter()

    def around(self, request: Request, send: Callable[[Request], R]) -> R:
        self.meter.add(kind=request.kind, up_bytes=request.up_bytes)
        result = send(request)
        self.meter.add(down_bytes=request.down_bytes(result))
        return result

    def open_poller(self) -> Poller:
        """See :func:`dcr_s3.store.open_poller`."""
        return MeteredPoller(open_poller(self.inner), self.meter)


class MeteredPoller:
    """A :class:`~dcr_s3.store.base.Poller` whose reads a meter counts."""

    def __init__(self, inner: Poller, meter: Meter) -> None:
        self._inner = inner
        self._meter = meter

    async def get(self, key: str, *, limit_bytes: int, if_none_match: str | None = None) -> Object | None:
        self._meter.add(kind="get")
        found = await self._inner.get(key, limit_bytes=limit_bytes, if_none_match=if_none_match)
        self._meter.add(down_bytes=0 if found is None else len(found.body))
        return found

    async def close(self) -> None:
        await self._inner.close()
