"""Actors: real code in threads of which exactly one runs at a time, handing a baton around at requests and disk writes.

Nothing depends on the operating system's scheduling: who runs next is decided by the driver alone.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import StrEnum

HANG_S = 300.0


class Crash(BaseException):
    """The process is gone at this very moment: nothing that it would still do has any effect."""


class Kind(StrEnum):
    """What an actor is about to do."""

    REQUEST = "request"
    DISK = "disk"
    SLEEP = "sleep"


@dataclass(frozen=True)
class Point:
    """A moment before something happens that others may see. ``name`` is the request's or the disk write's; ``key``
    the object's or the file's."""

    kind: Kind
    name: str
    key: str
    writes: bool = False

    def conflicts(self, other: Point) -> bool:
        """True where the order of the two matters."""
        if Kind.REQUEST not in (self.kind, other.kind) or self.kind is not other.kind:
            return False
        mine, theirs = (self, other) if self.name.startswith("list") else (other, self)
        same = theirs.key.startswith(mine.key) if mine.name.startswith("list") else mine.key == theirs.key
        return same and (self.writes or other.writes)

    def __str__(self) -> str:
        return f"{self.name} {self.key}"


class Baton:
    """Held by the driver or by one actor."""

    def __init__(self) -> None:
        self._driver = threading.Lock()
        self._driver.acquire()

    def pass_to(self, actor: Actor) -> None:
        """Lets an actor run until it hands the baton back. Called by the driver."""
        actor.turn.release()
        self._await(self._driver, actor)

    def hand_back(self, actor: Actor, *, forever: bool = False) -> None:
        """Called by the actor; returns when it is its turn again, or at once where it has ended."""
        self._driver.release()
        if not forever:
            self._await(actor.turn, actor)

    @staticmethod
    def _await(turn: threading.Lock, actor: Actor) -> None:
        if not turn.acquire(timeout=HANG_S):
            raise RuntimeError(f"{actor.name} neither ended nor reached a request within {HANG_S:.0f} s")


class Actor:
    """One simulated process. ``wake_s`` is the virtual time before which it does not want to run.

    ``history`` digests everything it has been told since it last began anew: what it will do next depends on nothing
    else. ``estate`` is what the process which comes after it will find, besides its disk.
    """

    def __init__(self, name: str, program: Callable[[], None], baton: Baton, on_death: Callable[[], None]) -> None:
        self.name = name
        self.on_death = on_death
        self.turn = threading.Lock()
        self.turn.acquire()
        self.wake_s = 0.0
        self.history = hashlib.md5(usedforsecurity=False)
        self.estate: Callable[[], Hashable] = lambda: None
        self.next: Point | None = None
        self.ended = False
        self.dead = False
        self.error: BaseException | None = None
        self._program = program
        self._baton = baton
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._thread.start()

    def offer(self, point: Point) -> None:
        """Waits for its turn to do what ``point`` says."""
        self.next = point
        self._baton.hand_back(self)
        self.next = None
        self.require_alive()

    def learn(self, *facts: object) -> None:
        """Adds to its history."""
        for fact in facts:
            self.history.update(fact if isinstance(fact, (bytes, bytearray, memoryview)) else repr(fact).encode())
            self.history.update(b"|")

    def begin_anew(self, *facts: object) -> None:
        """All that it goes on from is ``facts``."""
        self.history = hashlib.md5(usedforsecurity=False)
        self.learn(*facts)

    def require_alive(self) -> None:
        """Raises ``Crash`` in a process that has died, whatever it still tries."""
        if self.dead:
            raise Crash

    def die(self) -> None:
        """From now on nothing that this actor does has any effect."""
        self.dead = True

    def join(self) -> None:
        """Waits for the thread of an actor that has ended."""
        self._thread.join()

    def _live(self) -> None:
        self.turn.acquire()
        try:
            self.require_alive()
            self._program()
        except Crash:
            self.dead = True
        except BaseException as error:
            self.error = error
        self.ended = True
        self._baton.hand_back(self, forever=True)
