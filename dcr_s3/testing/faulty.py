"""A store in which things go wrong as they do in production: by script, or by seed."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import TypeVar

from dcr_s3.errors import CorruptObject, PreconditionFailed, StoreUnavailable
from dcr_s3.store.base import Object, Store
from dcr_s3.store.wrapped import Request, WrappedStore

R = TypeVar("R")


class FaultKind(StrEnum):
    """What goes wrong with one request."""

    UNAVAILABLE = "unavailable"  # it never arrives: StoreUnavailable
    LOST_REPLY = "lost_reply"  # it is carried out, but its reply is lost: StoreUnavailable
    CONFLICT = "conflict"  # a conditional put is refused without a reason that lasts (409): PreconditionFailed
    LATE_CONFLICT = (
        "late_conflict"  # a conditional put is applied, repeated by the client, and refused to its own writer
    )
    SHORT_BODY = "short_body"  # a read breaks off half-way: StoreUnavailable, the buffer half filled
    TRUNCATED = "truncated"  # the object itself ends half-way: half a body, or CorruptObject for a range
    FLIPPED_BIT = "flipped_bit"  # one bit of what is written or read changes, and nobody notices
    DELAY = "delay"  # it takes long, and then succeeds


_READS = ("get", "read")
_WRITES = ("put", "upload_part")


@dataclass(frozen=True)
class Fault:
    """A scripted fault: strikes ``times`` requests whose kind and key match the patterns (``*`` and ``?`` as in file
    names), after letting ``skip`` of them pass."""

    kind: FaultKind
    request: str = "*"
    key: str = "*"
    skip: int = 0
    times: int = 1


@dataclass(frozen=True)
class Struck:
    """A fault that happened."""

    kind: FaultKind
    request: str
    key: str


class FaultyStore(WrappedStore):
    """Disturbs the requests to another store.

    Faults come from ``script`` and, at ``rate`` (0 to 1), by chance among ``kinds``. Chance depends only on ``seed``
    and on which request it is (kind, key, part or range, how often it was tried), so the order in which threads get
    their turn does not matter. ``struck`` lists what happened; ``enabled`` set to False lets everything pass.
    """

    def __init__(
        self,
        inner: Store,
        script: Sequence[Fault] = (),
        *,
        seed: int = 0,
        rate: float = 0.0,
        kinds: Sequence[FaultKind] = tuple(FaultKind),
        delay_s: float = 0.05,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self.enabled = True
        self.struck: list[Struck] = []
        self._script = [*script]
        self._matched = [0] * len(self._script)
        self._seed = seed
        self._rate = rate
        self._kinds = [*kinds]
        self._delay_s = delay_s
        self._sleep = sleep
        self._lock = threading.Lock()
        self._tries: Counter[tuple[str, str, int]] = Counter()

    def around(self, request: Request, send: Callable[[Request], R]) -> R:
        kind = self._next_fault(request) if self.enabled else None
        if kind is None:
            return send(request)
        what = f"{request.kind} {self.url}/{request.key}"
        if kind is FaultKind.UNAVAILABLE:
            raise StoreUnavailable(f"injected: {what} got no answer")
        if kind is FaultKind.CONFLICT:
            raise PreconditionFailed(f"injected: {what} met another request")
        if kind is FaultKind.DELAY:
            self._sleep(self._delay_s)
        if kind is FaultKind.FLIPPED_BIT and request.body:
            return send(replace(request, body=_flipped(request.body)))
        return _disturbed(kind, request, send(request), what)

    def _next_fault(self, request: Request) -> FaultKind | None:
        place = (request.kind, request.key, request.number)
        with self._lock:
            attempt = self._tries[place]
            self._tries[place] += 1
            kind = self._scripted(request) or self._by_chance(request, f"{self._seed}/{place}/{attempt}")
            if kind is not None:
                self.struck.append(Struck(kind, request.kind, request.key))
            return kind

    def _scripted(self, request: Request) -> FaultKind | None:
        for index, fault in enumerate(self._script):
            if not (fnmatchcase(request.kind, fault.request) and fnmatchcase(request.key, fault.key)):
                continue
            if not _applies(fault.kind, request):
                continue
            self._matched[index] += 1
            if fault.skip < self._matched[index] <= fault.skip + fault.times:
                return fault.kind
        return None

    def _by_chance(self, request: Request, occasion: str) -> FaultKind | None:
        dice = random.Random(occasion)
        possible = [kind for kind in self._kinds if _applies(kind, request)]
        return dice.choice(possible) if dice.random() < self._rate and possible else None


def _applies(kind: FaultKind, request: Request) -> bool:
    match kind:
        case FaultKind.CONFLICT | FaultKind.LATE_CONFLICT:
            return request.conditional
        case FaultKind.SHORT_BODY | FaultKind.TRUNCATED:
            return request.kind in _READS
        case FaultKind.FLIPPED_BIT:
            return request.kind in _READS + _WRITES
        case _:
            return True


def _disturbed(kind: FaultKind, request: Request, result: R, what: str) -> R:
    """What becomes of a request that was carried out."""
    match kind:
        case FaultKind.LOST_REPLY:
            raise StoreUnavailable(f"injected: the reply to {what} was lost")
        case FaultKind.LATE_CONFLICT:
            raise PreconditionFailed(f"injected: {what} was repeated after it had been applied")
        case FaultKind.SHORT_BODY:
            _forget_half(request)
            raise StoreUnavailable(f"injected: {what} broke off")
        case FaultKind.TRUNCATED if request.buffer is not None:
            _forget_half(request)
            raise CorruptObject(f"injected: {what} ended early")
        case FaultKind.FLIPPED_BIT if request.buffer:
            request.buffer[:] = _flipped(request.buffer)
    if isinstance(result, Object) and kind in (FaultKind.TRUNCATED, FaultKind.FLIPPED_BIT):
        body = result.body[: len(result.body) // 2] if kind is FaultKind.TRUNCATED else bytes(_flipped(result.body))
        return replace(result, body=body)
    return result


def _forget_half(request: Request) -> None:
    if request.buffer is not None:
        rest = request.buffer[len(request.buffer) // 2 :]
        rest[:] = bytes(len(rest))


def _flipped(body: bytes | bytearray | memoryview) -> bytearray:
    changed = bytearray(body)
    if changed:
        changed[len(changed) // 2] ^= 1
    return changed
