"""Turns what a loader did with every canonical tensor into a route for each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dcr_s3.errors import BadInput
from dcr_s3.format.run import TensorSpec
from dcr_s3.targets.placement import Block, Placement, Route, TensorPlan
from dcr_s3.targets.placement_trace import LoadWeights, Place, Trace, Write, trace_loader
from dcr_s3.targets.storages import Storages


@dataclass
class _Fate:
    """What became of one tensor's writes."""

    blocks: list[Block] = field(default_factory=list)
    storages: set[int] = field(default_factory=set)
    exact: bool = True
    overwritten: bool = False
    reason: str = ""


def bind_loader(
    load_weights: LoadWeights, storages: Storages, specs: Sequence[TensorSpec], *, unwritten: Iterable[str] = ()
) -> Placement:
    """Traces the loader and decides a route for every tensor; nothing is written.

    ``unwritten`` names engine parameters that the checkpoint is known not to fill. Raises ``BadInput`` naming a tensor
    the loader does not take, or a parameter that it leaves unwritten though it should not.
    """
    trace = trace_loader(load_weights, storages, specs)
    fates = [_Fate() for _ in specs]
    groups = _Groups(len(specs))
    for tensors, storage, operation in trace.opaque:
        groups.join(tensors, f"the loader computes with it ({operation})")
        for number in tensors:
            fates[number].storages.add(storage)
    fixed = _place(trace, storages, fates, groups, set(unwritten))
    plans = tuple(_plan(number, fate, groups) for number, fate in enumerate(fates))
    return Placement(tuple(specs), plans, tuple(fixed))


def move_to_dense(placement: Placement, wrong: Sequence[int], companions: Callable[[int], Iterable[int]]) -> Placement:
    """The placement with tensors whose bits were changed after loading (repacked, say) on the dense route, each
    together with all that share its storage. ``companions`` gives the storages that move together with one.
    """
    by_storage: dict[int, set[int]] = defaultdict(set)
    for number, plan in enumerate(placement.plans):
        for storage in plan.storages:
            by_storage[storage].add(number)
    groups = _Groups(len(placement.specs))
    for number, plan in enumerate(placement.plans):
        if plan.route is not Route.DENSE and number not in wrong:
            continue
        reason = plan.reason if plan.route is Route.DENSE else "its bits are changed after loading"
        storages = {other for storage in plan.storages for other in companions(storage)} | plan.storages
        groups.join({number, *plan.group}.union(*(by_storage[s] for s in storages)), reason)
    plans = []
    for number, plan in enumerate(placement.plans):
        group = groups.of(number)
        joined = replace(plan, route=Route.DENSE, reason=group[1], group=group[0]) if group is not None else plan
        plans.append(joined)
    return replace(placement, plans=tuple(plans))


class _Groups:
    """Sets of tensors that must go through the loader together, and why."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))
        self._reason: dict[int, str] = {}
        self._members: dict[int, list[int]] = {}

    def join(self, tensors: Iterable[int], reason: str) -> None:
        roots = sorted({self._root(n) for n in tensors})
        for n in roots[1:]:
            self._parent[n] = roots[0]
        self._reason[roots[0]] = next((self._reason[n] for n in roots if n in self._reason), reason)
        self._members.clear()

    def of(self, number: int) -> tuple[tuple[int, ...], str] | None:
        """The group of a tensor and its reason; None if it is in none."""
        root = self._root(number)
        if root not in self._reason:
            return None
        if not self._members:
            for n in range(len(self._parent)):
                self._members.setdefault(self._root(n), []).append(n)
        return tuple(self._members[root]), self._reason[root]

    def _root(self, number: int) -> int:
        while self._parent[number] != number:
            self._parent[number] = self._parent[self._parent[number]]
            number = self._parent[number]
        return number


def _place(trace: Trace, storages: Storages, fates: list[_Fate], groups: _Groups, unwritten: set[str]) -> list[str]:
    """Sorts writes by storage, finds what overwrites what and what stays unwritten; returns the untouched tensors."""
    by_storage: dict[int, list[Write]] = defaultdict(list)
    for write in trace.writes:
        by_storage[write.place[0]].append(write)
    opaque = {storage for _, storage, _ in trace.opaque}
    fixed: list[str] = []
    for number, storage in enumerate(storages.items):
        writes = by_storage[number]
        surviving, written = _survivors(writes, storage.cells.numel())
        for index, write in enumerate(writes):
            if write.block is None:
                continue
            fate = fates[write.block.region.tensor]
            fate.storages.add(number)
            if surviving[index] == write.block.region.cells:
                fate.blocks.append(write.block)
                fate.exact &= write.exact
            elif surviving[index] == 0:
                fate.overwritten = True
            else:
                tensors = {w.block.region.tensor for w in writes if w.block is not None}
                groups.join(tensors, "the loader overwrites a part of it")
        if not writes and number not in opaque:
            fixed += storage.names
        missing = storage.cells.numel() - written
        if missing and storage.is_parameter and number not in opaque and not unwritten & set(storage.names):
            raise BadInput(
                f"engine parameter {storage.names[0]}: {missing:,} of its {storage.cells.numel():,} elements are "
                "written by no tensor of the run; if the engine fills it in another way, name it as unwritten"
            )
    return fixed


def _survivors(writes: Sequence[Write], size: int) -> tuple[list[int], int]:
    """Per write, how many of its elements no later write replaces; and how many elements are written at all."""
    spans = sorted(_span(w.place) for w in writes)
    if all(a[1] <= b[0] for a, b in pairwise(spans)):
        counts = [_elements(w.place) for w in writes]
        return counts, sum(counts)
    owner: npt.NDArray[np.int32] = np.full(size, -1, np.int32)
    for index, write in enumerate(writes):
        _, start, shape, strides = write.place
        box = np.lib.stride_tricks.as_strided(owner[start:], shape, [4 * s for s in strides])
        box[...] = index
    counts = np.bincount(owner[owner >= 0], minlength=len(writes)).tolist()
    return counts, sum(counts)


def _span(place: Place) -> tuple[int, int]:
    _, start, shape, strides = place
    return start, start + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1


def _elements(place: Place) -> int:
    count = 1
    for extent in place[2]:
        count *= extent
    return count


def _plan(number: int, fate: _Fate, groups: _Groups) -> TensorPlan:
    blocks, storages = tuple(fate.blocks), frozenset(fate.storages)
    group = groups.of(number)
    if group is not None:
        return TensorPlan(Route.DENSE, blocks, group[1], storages, group[0])
    if not fate.blocks:
        reason = "a later tensor overwrites it" if fate.overwritten else "the loader leaves it out"
        return TensorPlan(Route.SKIPPED, reason=reason)
    if fate.exact:
        return TensorPlan(Route.PLANNED, blocks, "copied bit for bit", storages)
    return TensorPlan(Route.LOADER, blocks, "converted element by element", storages)
