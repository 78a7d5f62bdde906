"""The planner against an exhaustive search, and what retention keeps against what the planner needs."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from dcr_s3.protocol.plan import STEP_BYTES, Edge, cheapest, total_bytes
from dcr_s3.protocol.retention import needed

MOST = 7


@st.composite
def bucket(draw: st.DrawFn) -> list[Edge]:
    """Deltas of 1 to MOST versions, some missing; folds; snapshots. Versions from 0."""
    sizes = st.integers(0, 40 * STEP_BYTES)
    newest = draw(st.integers(1, MOST))
    edges = [Edge("delta", v - 1, v, draw(sizes)) for v in range(1, newest + 1) if draw(st.integers(0, 5))]
    for first, last in draw(st.sets(st.tuples(st.integers(0, newest), st.integers(0, newest)), max_size=4)):
        if last - first > 1:
            edges.append(Edge("fold", first, last, draw(sizes)))
    edges += [Edge("snapshot", -1, v, draw(sizes)) for v in draw(st.sets(st.integers(0, newest), max_size=3))]
    return draw(st.permutations(edges))


def every_way(edges: list[Edge], start: int | None, wanted: int) -> list[list[Edge]]:
    """All ways, without regard to cost."""
    if start == wanted:
        return [[]]
    result: list[list[Edge]] = []
    for edge in edges:
        leads_on = edge.kind == "snapshot" if start is None else edge.first == start or edge.kind == "snapshot"
        if leads_on and edge.last <= wanted and (start is None or edge.last > start):
            result += [[edge, *rest] for rest in every_way(edges, edge.last, wanted)]
    return result


def cost(path: list[Edge]) -> int:
    return sum(edge.cost for edge in path)


@settings(deadline=None)
@given(bucket(), st.one_of(st.none(), st.integers(0, MOST)), st.integers(0, MOST))
def test_the_plan_is_the_cheapest_of_all_ways(edges: list[Edge], start: int | None, wanted: int) -> None:
    path = cheapest(edges, start, wanted)
    ways = every_way(edges, start, wanted) if start is None or start <= wanted else []
    if path is None:
        assert ways == []
        return
    assert cost(path) == min(map(cost, ways))
    assert total_bytes(path) == sum(edge.size_bytes for edge in path)
    assert all(a.last == b.first for a, b in pairwise(path) if b.kind != "snapshot")
    assert not path or path[-1].last == wanted
    assert all(edge.kind != "snapshot" for edge in path[1:])


@settings(deadline=None)
@given(bucket(), st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_of_the_listing(edges: list[Edge], random: object) -> None:
    newest = max((e.last for e in edges), default=0)
    shuffled = sorted(edges, key=lambda e: hash((e.size_bytes, e.last)))
    assert cheapest(edges, 0, newest) == cheapest(shuffled, 0, newest)


@settings(deadline=None)
@given(bucket(), st.sets(st.integers(0, MOST), max_size=3), st.integers(0, MOST), st.integers(1, 3), st.data())
def test_after_retention_everyone_who_may_exist_still_gets_there(
    edges: list[Edge], held: set[int], released: int, keep_versions: int, data: st.DataObject
) -> None:
    newest = max((e.last for e in edges if e.kind == "delta"), default=0)
    edges = [e for e in edges if e.last <= newest]
    held = {min(v, newest) for v in held}
    released = min(released, newest)
    old = [e for e in edges if data.draw(st.booleans())]
    kept = needed(edges, old, held, {newest, released}, keep_versions)
    assert kept <= set(edges)
    for target in (newest, released):
        for start in (None, *held):
            before, after = cheapest(edges, start, target), cheapest(kept, start, target)
            if before is not None:
                assert after is not None
                assert cost(after) == cost(before)
    for start in range(newest):  # receivers whose lease ended, or that nobody has heard of
        if cheapest(edges, start, newest) is not None:
            assert cheapest(kept, start, newest) is not None
    reach = max((e.last for e in old if e.kind == "delta"), default=0)
    for start in (None, *held):  # those who set out before the newest shortcuts were there
        before = cheapest(old, start, reach)
        if before is not None and cheapest(edges, None, newest) is not None:
            assert set(before) <= kept or cost(cheapest(kept & set(old), start, reach) or []) == cost(before)


@settings(deadline=None)
@given(bucket(), st.integers(1, 3))
def test_without_a_snapshot_every_delta_stays(edges: list[Edge], keep_versions: int) -> None:
    deltas = [e for e in edges if e.kind != "snapshot"]
    newest = max((e.last for e in deltas), default=1)
    assert needed(deltas, deltas, [0], {newest}, keep_versions) == set(deltas)
