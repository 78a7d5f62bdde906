"""Who was busy when: intervals by stage, so that overlap can be shown instead of claimed."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

Interval = tuple[float, float]


class Timeline:
    """Collects (begin, end) intervals per stage from any thread. Times are seconds since the timeline was made."""

    def __init__(self) -> None:
        self._origin = monotonic()
        self._intervals: dict[str, list[Interval]] = defaultdict(list)
        self._lock = threading.Lock()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts the time inside as one interval of ``name``."""
        begin = monotonic() - self._origin
        try:
            yield
        finally:
            with self._lock:
                self._intervals[name].append((begin, monotonic() - self._origin))

    def unions(self) -> dict[str, list[Interval]]:
        """Per stage, the disjoint intervals in which at least one thread was busy with it."""
        with self._lock:
            return {name: union(intervals) for name, intervals in self._intervals.items()}

    def seconds(self) -> dict[str, float]:
        """Per stage, the length of its union; and ``total``, seconds since the timeline was made."""
        lengths = {name: round(sum(e - b for b, e in spans), 6) for name, spans in self.unions().items()}
        return {**lengths, "total": round(monotonic() - self._origin, 6)}


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Merges overlapping intervals."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged
