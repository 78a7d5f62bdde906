"""Digests: SHA-256 over stored objects, and the additive digest of a run's state."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

_MASK = (1 << 64) - 1


def sha256_hex(data: bytes | bytearray | memoryview) -> str:
    """SHA-256 of an object's bytes, as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class StateDigest:
    """Two independent sums modulo 2**64 over (tensor, cell index, stored bits).

    Pieces computed anywhere, in any order, add up; replacing cells subtracts their old terms and adds the new ones.
    Equal states have equal digests; a state that differs in any cell has another digest but for a chance of about
    2**-128. It guards against mistakes, not against an adversary: objects carry SHA-256 for that.
    """

    low: int = 0
    high: int = 0

    def __add__(self, other: StateDigest) -> StateDigest:
        return StateDigest((self.low + other.low) & _MASK, (self.high + other.high) & _MASK)

    def __sub__(self, other: StateDigest) -> StateDigest:
        return StateDigest((self.low - other.low) & _MASK, (self.high - other.high) & _MASK)

    def hex(self) -> str:
        """32 hex digits, ``high`` first."""
        return f"{self.high:016x}{self.low:016x}"

    @classmethod
    def from_hex(cls, text: str) -> StateDigest:
        """Inverse of :meth:`hex`. Raises ValueError on anything but 32 hex digits."""
        if len(text) != 32:
            raise ValueError(f"a state digest has 32 hex digits, not {len(text)}")
        return cls(int(text[16:], 16), int(text[:16], 16))
