"""A placement: where an engine's storage holds every canonical cell, as its own loader decides it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from dcr_s3.format.region import Region
from dcr_s3.format.run import TensorSpec

Indices = npt.NDArray[np.int64]


class Route(Enum):
    """How changes of one canonical tensor reach the engine."""

    PLANNED = "planned"
    """Every cell has a place and keeps its bits: changed cells are written straight there."""
    LOADER = "loader"
    """Every cell has a place but its value is converted: the loader converts, its final copies are intercepted."""
    DENSE = "dense"
    """The loader does more than place cells one by one: the whole group goes through it."""
    SKIPPED = "skipped"
    """The loader leaves it out, or overwrites all of it with a later tensor: held elsewhere, or not needed."""


@dataclass(frozen=True)
class Block:
    """Cells of one canonical tensor and the engine elements that hold them, both walked in ``region.shape`` order.

    ``start`` and ``strides`` count elements of engine storage number ``storage``. Dims are ordered by falling canonical
    stride and as few as possible, so a block that is consecutive on both sides has one dim.
    """

    region: Region
    storage: int
    start: int
    strides: tuple[int, ...]

    @classmethod
    def of(cls, region: Region, storage: int, start: int, strides: Sequence[int]) -> Block:
        """The block in its simplest form."""
        dims = sorted(
            ((n, s, d) for n, s, d in zip(region.shape, region.strides, strides, strict=True) if n != 1),
            key=lambda dim: -dim[1],
        )
        merged: list[tuple[int, int, int]] = []
        for extent, source, target in dims:
            if merged and merged[-1][1] == extent * source and merged[-1][2] == extent * target:
                merged[-1] = (merged[-1][0] * extent, source, target)
            else:
                merged.append((extent, source, target))
        merged = merged or [(1, 1, 1)]
        shape, sources, targets = (tuple(dim[part] for dim in merged) for part in range(3))
        return cls(Region(region.tensor, region.start, shape, sources), storage, start, targets)

    def held(self, positions: Indices) -> tuple[slice | npt.NDArray[np.intp], tuple[Indices, ...]]:
        """Which of the ascending canonical ``positions`` lie in this block (a slice or indices into them), and their
        coordinates in it, one array per dim.
        """
        region = self.region
        last = region.start + sum((n - 1) * s for n, s in zip(region.shape, region.strides, strict=True))
        lo, hi = np.searchsorted(positions, (region.start, last + 1)).tolist()
        rest = positions[lo:hi] - region.start
        if region.is_run:
            return slice(lo, hi), (rest,)
        coordinates: list[Indices] = []
        inside = np.ones(rest.size, np.bool_)
        for extent, stride in zip(region.shape, region.strides, strict=True):
            index, rest = np.divmod(rest, stride)
            inside &= index < extent
            coordinates.append(index)
        inside &= rest == 0
        if inside.all():
            return slice(lo, hi), tuple(coordinates)
        chosen = np.flatnonzero(inside)
        return chosen + lo, tuple(c[chosen] for c in coordinates)

    def places(self, coordinates: Sequence[Indices]) -> Indices:
        """Engine elements at these coordinates."""
        result: Indices = np.full(coordinates[0].size, self.start, np.int64)
        for index, stride in zip(coordinates, self.strides, strict=True):
            result += index * stride if stride != 1 else index
        return result


@dataclass(frozen=True)
class TensorPlan:
    """What is done with one canonical tensor, and why.

    ``storages``: all that the loader writes for it. ``group`` names the tensors that go through the loader together
    with it (numbers, itself included).
    """

    route: Route
    blocks: tuple[Block, ...] = ()
    reason: str = ""
    storages: frozenset[int] = frozenset()
    group: tuple[int, ...] = ()


@dataclass(frozen=True)
class Placement:
    """One plan per canonical tensor, in the order of the run's table."""

    specs: tuple[TensorSpec, ...]
    plans: tuple[TensorPlan, ...]
    fixed: tuple[str, ...] = ()
    """Engine tensors that the loader never writes: buffers it leaves alone."""

    def by_route(self, *routes: Route) -> Iterator[int]:
        """Numbers of the tensors on one of these routes."""
        return (n for n, plan in enumerate(self.plans) if plan.route in routes)

    def groups(self) -> list[tuple[int, ...]]:
        """The groups of the dense route, each once."""
        return sorted({p.group for p in self.plans if p.route is Route.DENSE})

    def group_storages(self, group: Sequence[int]) -> frozenset[int]:
        """All storages that the loader writes for a group."""
        return frozenset().union(*(self.plans[n].storages for n in group))

    def counts(self) -> dict[str, int]:
        """How many tensors go which way, by route name."""
        found = Counter(p.route.value for p in self.plans)
        return {route.value: found[route.value] for route in Route}

    def holds(self, number: int) -> bool:
        """True where every cell of the tensor is placed here."""
        return sum(b.region.cells for b in self.plans[number].blocks) == self.specs[number].cells
