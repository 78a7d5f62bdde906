"""Which requests go wrong, and how: by script, or by seed."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase


class FaultKind(StrEnum):
    """What goes wrong with one request."""

    UNAVAILABLE = "unavailable"
    """It is not carried out: StoreUnavailable (a 503 on the wire)."""
    LOST_REPLY = "lost_reply"
    """It is carried out, but its reply is lost: StoreUnavailable (a connection that closes)."""
    CONFLICT = "conflict"
    """A conditional put is refused for no lasting reason (409): PreconditionFailed."""
    LATE_CONFLICT = "late_conflict"
    """A conditional put is applied, repeated by the client, and refused to its own writer: PreconditionFailed."""
    SHORT_BODY = "short_body"
    """A read breaks off half-way: StoreUnavailable, a buffer is half filled."""
    TRUNCATED = "truncated"
    """The object itself ends half-way: half a body, or CorruptObject for a range."""
    FLIPPED_BIT = "flipped_bit"
    """One bit of what is written or read changes."""
    DELAY = "delay"
    """It takes long, and then succeeds."""


@dataclass(frozen=True)
class Fault:
    """A scripted fault: strikes ``times`` requests whose name and key match the patterns (``*`` and ``?`` as in file
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


class FaultPlan:
    """Faults from ``script`` and, at ``rate`` (0 to 1), by chance among ``kinds``.

    Chance depends only on ``seed`` and on which request it is (name, key, part or range, how often it was tried), so
    the order in which threads get their turn does not matter. ``struck`` lists what happened; ``enabled`` set to False
    lets everything pass.
    """

    def __init__(
        self,
        script: Sequence[Fault] = (),
        *,
        seed: int = 0,
        rate: float = 0.0,
        kinds: Sequence[FaultKind] = tuple(FaultKind),
    ) -> None:
        self.enabled = True
        self.struck: list[Struck] = []
        self._script = [*script]
        self._matched = [0] * len(self._script)
        self._seed = seed
        self._rate = rate
        self._kinds = [*kinds]
        self._lock = threading.Lock()
        self._tries: Counter[tuple[str, str, str]] = Counter()

    def strike(self, request: str, key: str, place: str, possible: Collection[FaultKind]) -> FaultKind | None:
        """The fault, one of ``possible``, that the next request of this name for this key and place meets, if any."""
        if not self.enabled:
            return None
        with self._lock:
            attempt = self._tries[request, key, place]
            self._tries[request, key, place] += 1
            occasion = f"{self._seed}/{request}/{key}/{place}/{attempt}"
            kind = self._scripted(request, key, possible) or self._by_chance(occasion, possible)
            if kind is not None:
                self.struck.append(Struck(kind, request, key))
            return kind

    def _scripted(self, request: str, key: str, possible: Collection[FaultKind]) -> FaultKind | None:
        for index, fault in enumerate(self._script):
            if fault.kind not in possible or not fnmatchcase(request, fault.request) or not fnmatchcase(key, fault.key):
                continue
            self._matched[index] += 1
            if fault.skip < self._matched[index] <= fault.skip + fault.times:
                return fault.kind
        return None

    def _by_chance(self, occasion: str, possible: Collection[FaultKind]) -> FaultKind | None:
        dice = random.Random(occasion)
        kinds = [kind for kind in self._kinds if kind in possible]
        return dice.choice(kinds) if dice.random() < self._rate and kinds else None


def flipped(body: bytes | bytearray | memoryview) -> bytearray:
    """A copy with one bit changed, if there is any."""
    changed = bytearray(body)
    if changed:
        changed[len(changed) // 2] ^= 1
    return changed
