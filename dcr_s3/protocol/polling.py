"""When a follower looks at what. Every look is one GET that returns no body while nothing is new."""

from __future__ import annotations

from dataclasses import dataclass

ACTIVE_INTERVAL_S = 0.2


@dataclass
class Polling:
    """Looks at the next manifest and, where its sender has announced it, at the next segment being written, in turn.

    ``seq`` counts the segments seen of that version. Once segments appear, a commit is near and the looks follow each
    other quickly. Methods return the seconds to wait before the next look, without jitter.
    """

    interval_s: float
    seq: int = 0
    at_segment: bool = False

    def after_manifest(self, *, found: bool, announced: bool) -> float:
        """``announced``: the newest manifest says where the next version's segments will be."""
        if found:
            self.seq, self.at_segment = 0, False
            return 0.0
        self.at_segment = announced
        return self._interval()

    def after_segment(self, *, found: bool) -> float:
        """A segment that was found is followed at once by a look at the one after it."""
        self.at_segment = found
        if found:
            self.seq += 1
            return 0.0
        return self._interval()

    def _interval(self) -> float:
        return min(self.interval_s, ACTIVE_INTERVAL_S) if self.seq else self.interval_s
