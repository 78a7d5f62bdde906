"""One process's way to the simulated bucket: every request is a point, and may meet a fault."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TypeVar

from dcr_s3.errors import DcrError, NotFound, StoreOutcome, StoreUnavailable
from dcr_s3.store.base import Object, Store
from dcr_s3.store.wrapped import Request, WrappedStore
from dcr_s3.testing.faults import FaultKind, FaultPlan
from dcr_s3.testing.faulty import FaultyStore, possible_faults
from dcr_s3.testing.sim.actors import Crash, Kind, Point
from dcr_s3.testing.sim.choices import CRASH, CRASH_LATE, POWER_LOSS
from dcr_s3.testing.sim.simulation import Simulation
from dcr_s3.testing.sim.world import SimWorld
from dcr_s3.world import living_in

R = TypeVar("R")

WRITES = ("put", "complete", "delete")
DUPLICATE = "duplicate"
"""The request arrives twice; the second reply is the one that is seen."""
LATE = "late"
"""No answer; the request arrives some time later."""
ABSENT = "absent"
"""A read finds nothing although something is there."""
PAUSE = "pause"
"""The process stands still for long, and then goes on as if nothing had happened."""
LATEST_S = 120.0
PAUSE_S = 3600.0


class _OneFault(FaultPlan):
    """Strikes with what was decided, once."""

    def __init__(self) -> None:
        super().__init__()
        self.next: FaultKind | None = None

    def strike(self, request: str, key: str, place: str, possible: Collection[FaultKind]) -> FaultKind | None:
        kind, self.next = self.next, None
        return kind


class SimStore(WrappedStore):
    """``sent`` is told of every request before it goes out, in whichever way it then arrives. ``menu`` restricts the
    faults; None allows all."""

    def __init__(
        self,
        bucket: Store,
        simulation: Simulation,
        world: SimWorld,
        sent: Callable[[Request], None],
        menu: Collection[str] | None = None,
    ) -> None:
        self._plan = _OneFault()
        super().__init__(FaultyStore(bucket, self._plan, sleep=world.sleep))
        self._simulation = simulation
        self._world = world
        self._late = 0
        self._sent = sent
        self._menu = menu

    def around(self, request: Request, send: Callable[[Request], R]) -> R:
        me = self._world.me
        try:
            result = self._disturb(request, send)
        except Exception as error:
            me.learn(type(error).__name__)
            raise
        me.learn(result if request.buffer is None else request.buffer)
        return result

    def _disturb(self, request: Request, send: Callable[[Request], R]) -> R:
        writes = request.kind in WRITES
        point = Point(Kind.REQUEST, request.kind, request.key, writes)
        fault = self._simulation.at(self._world.me, self._world.machine, point, self._possible(request))
        self._sent(request)
        match fault:
            case None:
                return send(request)
            case "late" | "crash_late":
                self._send_late(request, send)
                if fault == CRASH_LATE:
                    raise Crash
                raise StoreUnavailable(f"simulated: {request.kind} {request.key} got no answer")
            case "duplicate":
                try:
                    send(request)
                except (StoreOutcome, DcrError):
                    pass
                return send(request)
            case "absent":
                raise NotFound(f"simulated: no object {request.key}")
            case FaultKind.FLIPPED_BIT:
                return self._flip(request, send(request))
            case "pause":
                self._simulation.sleep(self._world.me, PAUSE_S)
                return send(request)
        self._plan.next = FaultKind(fault)
        return send(request)

    def _possible(self, request: Request) -> list[str]:
        faults = [str(f) for f in sorted(possible_faults(request))]
        if request.kind in ("put", "upload_part"):
            # The checksum sent along would make the store refuse a body that changed on its way.
            faults.remove(FaultKind.FLIPPED_BIT)
        if request.kind in WRITES:
            faults += [DUPLICATE, LATE, CRASH_LATE]
        if request.kind in ("get", "read", "head"):
            faults.append(ABSENT)
        faults += [PAUSE, CRASH, POWER_LOSS]
        return [f for f in faults if self._menu is None or f in self._menu]

    def _flip(self, request: Request, result: R) -> R:
        """One bit of what was read changes on its way."""
        body = bytearray(result.body if isinstance(result, Object) else request.buffer or b"")
        if body:
            body[(len(body) // 2 + self._simulation.choices.number(len(body))) % len(body)] ^= 1
        if request.buffer is not None:
            request.buffer[:] = body
        return replace(result, body=bytes(body)) if isinstance(result, Object) else result

    def _send_late(self, request: Request, send: Callable[[Request], object]) -> None:
        """A process of its own carries the request."""
        copy = replace(request, body=None if request.body is None else bytearray(request.body))
        self._late += 1
        delay_s = self._simulation.choices.number(int(LATEST_S))
        carrier = SimWorld(self._simulation, self._world.machine, self._simulation.dice("carrier"))

        def program() -> None:
            with living_in(carrier):
                carrier.sleep(float(delay_s))
                carrier.me.offer(Point(Kind.REQUEST, copy.kind, copy.key, True))
                try:
                    send(copy)
                except (StoreOutcome, DcrError):
                    pass

        carrier.actor = self._simulation.spawn(f"{self._world.me.name}-late-{self._late}", program)
        carrier.actor.learn(copy.kind, copy.key, copy.body)
