"""Who belongs to a run, and who has proved a version. A receiver joins by its first acknowledgement, leaves by deleting
it, and drops out when its lease ends without a renewal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dcr_s3.protocol.position import Position

Required = Sequence[str] | int | None
"""Receivers by name, or how many members, or None for every member."""


@dataclass(frozen=True)
class Member:
    """What one acknowledgement says. ``seen_at`` is the store's clock, seconds since the epoch, ``lease_s`` seconds."""

    name: str
    version: int
    state: str
    seen_at: float
    lease_s: int

    def alive(self, now: float) -> bool:
        """True while the lease runs."""
        return now < self.seen_at + self.lease_s

    def has_proved(self, position: Position) -> bool:
        """True if it holds this version, bit for bit, or a newer one."""
        if self.version == position.version:
            return self.state == position.state
        return self.version > position.version


def living(members: Iterable[Member], now: float) -> list[Member]:
    """Those whose lease runs, by name."""
    return sorted((m for m in members if m.alive(now)), key=lambda m: m.name)


def proved_by(members: Iterable[Member], position: Position) -> list[str]:
    """Names of those that hold the version or a newer one, sorted."""
    return sorted(m.name for m in members if m.has_proved(position))


def lacking(members: Sequence[Member], position: Position, required: Required, now: float) -> list[str]:
    """What is missing before all required receivers have proved a version: one phrase a receiver, none if nothing is.

    Names must have proved it, alive or not; a count and "every member" look at living members only.
    """
    here = {m.name: m for m in members}
    if isinstance(required, int):
        alive = living(members, now)
        proved = sum(m.has_proved(position) for m in alive)
        waiting = [_phrase(m, position, now) for m in alive if not m.has_proved(position)]
        unknown = max(0, required - len(alive))
        more = [f"{unknown} that nobody has heard of"] if unknown else []
        return waiting + more if proved < required else []
    names = [m.name for m in living(members, now)] if required is None else sorted(set(required))
    behind = [n for n in names if n not in here or not here[n].has_proved(position)]
    return [_phrase(here[n], position, now) if n in here else f"{n} (never heard of, or left)" for n in behind]


def _phrase(member: Member, position: Position, now: float) -> str:
    if member.version == position.version:
        return f"{member.name} (claims version {member.version} with other bits)"
    silent = "" if member.alive(now) else f", silent for {now - member.seen_at:.0f} s, its lease is over"
    return f"{member.name} (at version {member.version}{silent})"
