"""What has to stay so that everyone who may exist can catch up."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dcr_s3.protocol.plan import Edge, cheapest


def needed(
    edges: Collection[Edge], old: Collection[Edge], held: Iterable[int], wanted: Iterable[int], keep_versions: int
) -> set[Edge]:
    """The edges that may not be deleted.

    ``held`` are versions that living receivers stand at; another may come with nothing. ``wanted`` are versions to
    get to, the newest among them. For each pair the cheapest way stays, and so does the cheapest way of ``old`` edges
    alone: whoever set out before a shorter way was there may still be on it. Also the deltas of the last
    ``keep_versions``. Where nothing leads from nothing to the newest version (no snapshot), every delta stays:
    receivers that left or were never heard of have no other way.
    """
    targets = sorted(set(wanted))
    newest = targets[-1]
    kept = {e for e in edges if e.kind == "delta" and e.last > newest - keep_versions}
    if cheapest(edges, None, newest) is None:
        return set(edges)
    for group in (edges, old):
        reach = max((e.last for e in group if e.kind == "delta"), default=0)
        if group is old and cheapest(old, None, min(reach, newest)) is None:
            return set(edges)
        for start in (None, *sorted(set(held))):
            for target in targets:
                if start is None or start < target:
                    kept.update(cheapest(group, start, min(target, reach)) or ())
    return kept
