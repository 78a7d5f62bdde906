"""When a follower looks at what. Every look is one GET that returns no body while nothing is new."""

from __future__ import annotations

from dataclasses import dataclass

ACTIVE_INTERVAL_S = 0.05
SLOWER = 1.5


@dataclass
class Polling:
    """Looks at the next manifest and, where its sender has announced it, at the next segment being written, in turn.

    ``seq`` counts the segments seen of that version. Once segments appear, a commit is near: manifest and segment are
    looked at one right after the other, soon again at first and more slowly with every look in vain, so that a sender
    that has stopped costs little. Methods return the seconds to wait before the next look, without jitter.
    """

    interval_s: float
    seq: int = 0
    at_segment: bool = False
    in_vain: int = 0

    def after_manifest(self, *, found: bool, announced: bool) -> float:
        """``announced``: the newest manifest says where the next version's segments will be."""
        if found:
            self.seq, self.at_segment, self.in_vain = 0, False, 0
            return 0.0
        self.at_segment = announced
        if not self.seq:
            return self.interval_s
        self.in_vain += 1
        return min(self.interval_s, ACTIVE_INTERVAL_S * SLOWER ** min(self.in_vain - 1, 64))

    def after_segment(self, *, found: bool) -> float:
        """A segment that was found is followed at once by a look at the one after it, the last one by the manifest."""
        self.at_segment = found
        if found:
            self.seq += 1
            self.in_vain = 0
            return 0.0
        return 0.0 if self.seq else self.interval_s
