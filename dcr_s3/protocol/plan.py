"""The cheapest way from a position, or from nothing, to a version."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

STEP_BYTES = 256 << 10
"""What a step costs beside its bytes, in bytes: about what a link carries while a few requests are answered."""


@dataclass(frozen=True)
class Edge:
    """One step that the bucket offers, of ``size_bytes``. A snapshot leads to ``last`` from anywhere (``first`` -1)."""

    kind: Literal["delta", "fold", "snapshot"]
    first: int
    last: int
    size_bytes: int

    @property
    def cost(self) -> int:
        return self.size_bytes + STEP_BYTES


def cheapest(edges: Iterable[Edge], start: int | None, wanted: int) -> list[Edge] | None:
    """The steps from version ``start`` (None: nothing is held) to ``wanted`` with the least cost; None if there is no
    way. Of equal ways the one that is found first in order of (first, last, kind), so that all agree.
    """
    best: dict[int, tuple[int, Edge | None]] = {} if start is None else {start: (0, None)}
    for edge in sorted(edges, key=lambda e: (e.first, e.last, e.kind, e.size_bytes)):
        if edge.last > wanted or (start is not None and edge.last <= start):
            continue
        if edge.kind == "snapshot":
            before = 0
        elif edge.first in best:
            before = best[edge.first][0]
        else:
            continue
        if edge.last not in best or before + edge.cost < best[edge.last][0]:
            best[edge.last] = (before + edge.cost, edge)
    if wanted not in best:
        return None
    path: list[Edge] = []
    edge_in = best[wanted][1]
    while edge_in is not None:
        path.append(edge_in)
        edge_in = None if edge_in.kind == "snapshot" else best[edge_in.first][1]
    return path[::-1]


def beyond_snapshot_bytes(edges: Iterable[Edge], wanted: int) -> int | None:
    """What a new receiver fetches beside its snapshot to get to a version; None if there is no way."""
    path = cheapest(edges, None, wanted)
    return total_bytes(path[1:]) if path is not None else None


def chain_bytes(edges: Iterable[Edge], first: int, last: int) -> int:
    """Bytes of the deltas that are there between two versions."""
    return total_bytes(e for e in edges if e.kind == "delta" and first < e.last <= last)


def total_bytes(path: Iterable[Edge]) -> int:
    """Bytes that a way takes."""
    return sum(edge.size_bytes for edge in path)
