"""What has to stay so that everyone who may exist can catch up."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dcr_s3.protocol.plan import Edge, cheapest


def needed(
    edges: Collection[Edge], old: Collection[Edge], held: Iterable[int], wanted: Iterable[int], keep_versions: int
) -> set[Edge]:
    """The edges that may not be deleted.

    ``held`` are versions that living receivers stand at, ``wanted`` versions to get to, the newest among them. What
    stays is, for each wanted version: the cheapest way from each held version and from nothing, and everything after
    the snapshot that the latter begins with: a receiver that nobody knows of can go by it if it is before it, and
    needs what there is if it is after it. The same once more among ``old`` edges alone, since somebody may have set
    out before anything else was there. Also the deltas of the last ``keep_versions``. Where nothing leads from nothing
    to the newest version (no snapshot), everything stays.
    """
    targets = sorted(set(wanted))
    newest = targets[-1]
    kept = {e for e in edges if e.kind == "delta" and e.last > newest - keep_versions}
    for group in (edges, old):
        reach = newest if group is edges else max((e.last for e in group if e.kind == "delta"), default=0)
        if cheapest(group, None, min(newest, reach)) is None:
            return set(edges)
        for target in (min(t, reach) for t in targets):
            way = cheapest(group, None, target) or []
            kept.update(way)
            if way:
                begin = way[0].last
                after = (e for e in edges if begin < e.last <= target)
                kept.update(e for e in after if e.kind == "snapshot" or e.first >= begin)
            for start in set(held):
                kept.update(cheapest(group, start, target) or ())
    return kept
