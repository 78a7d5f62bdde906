"""A store in which things go wrong as they do in production."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from dcr_s3.errors import CorruptObject, PreconditionFailed, StoreUnavailable
from dcr_s3.store.base import Object, Store
from dcr_s3.store.wrapped import Request, WrappedStore
from dcr_s3.testing.faults import FaultKind, FaultPlan, flipped

R = TypeVar("R")

_READS = ("get", "read")
_WRITES = ("put", "upload_part")


class FaultyStore(WrappedStore):
    """Disturbs the requests to another store as ``plan`` says. Requests go by the names of
    :data:`~dcr_s3.store.wrapped.RequestKind`; a delay takes ``delay_s``."""

    def __init__(
        self,
        inner: Store,
        plan: FaultPlan,
        *,
        delay_s: float = 0.05,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self.plan = plan
        self._delay_s = delay_s
        self._sleep = sleep

    def around(self, request: Request, send: Callable[[Request], R]) -> R:
        kind = self.plan.strike(request.kind, request.key, str(request.number), possible_faults(request))
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
            return send(replace(request, body=flipped(request.body)))
        return _disturbed(kind, request, send(request), what)


def possible_faults(request: Request) -> set[FaultKind]:
    """What may go wrong with a request."""
    kinds = {FaultKind.UNAVAILABLE, FaultKind.LOST_REPLY, FaultKind.DELAY}
    if request.conditional:
        kinds |= {FaultKind.CONFLICT, FaultKind.LATE_CONFLICT}
    if request.kind in _READS:
        kinds |= {FaultKind.SHORT_BODY, FaultKind.TRUNCATED}
    if request.kind in _READS + _WRITES:
        kinds |= {FaultKind.FLIPPED_BIT}
    return kinds


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
            request.buffer[:] = flipped(request.buffer)
    if isinstance(result, Object) and kind in (FaultKind.TRUNCATED, FaultKind.FLIPPED_BIT):
        body = result.body[: len(result.body) // 2] if kind is FaultKind.TRUNCATED else bytes(flipped(result.body))
        return replace(result, body=body)
    return result


def _forget_half(request: Request) -> None:
    if request.buffer is not None:
        rest = request.buffer[len(request.buffer) // 2 :]
        rest[:] = bytes(len(rest))
