"""Which parts of the canonical tensors a rank holds, as regions: what it must fetch, and who counts what in a proof."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

from dcr_s3.format.region import Region
from dcr_s3.format.run import TensorSpec

Box = tuple[tuple[int, int], ...]
"""Per dim of a tensor, first and one past the last index."""


def bounding_box(region: Region, shape: Sequence[int]) -> Box:
    """The smallest box of the tensor's own dims that surely contains the region. ``shape`` counts cells."""
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    last = region.start + sum((n - 1) * s for n, s in zip(region.shape, region.strides, strict=True))
    box: list[tuple[int, int]] = []
    low, high, whole = region.start, last, False
    for extent, stride in zip(shape, strides, strict=True):
        first, low = divmod(low, stride)
        final, high = divmod(high, stride)
        if whole or final < first:
            first, final = 0, extent - 1
        elif region.is_run and final > first:
            whole = True
        box.append((first, final + 1))
    return tuple(box)


def overlap(a: Box, b: Box) -> bool:
    """True where two boxes share an index."""
    return all(x[0] < y[1] and y[0] < x[1] for x, y in zip(a, b, strict=True))


def cell_shape(spec: TensorSpec) -> tuple[int, ...]:
    """The tensor's shape in cells: as it is, or flat where elements share bytes."""
    return spec.shape if prod(spec.shape) == spec.cells else (spec.cells,)


class Held:
    """The parts that one rank holds, for quick answers."""

    def __init__(self, specs: Sequence[TensorSpec], regions: Iterable[Region]) -> None:
        self._shapes = [cell_shape(s) for s in specs]
        self._cells = [0] * len(specs)
        self._boxes: dict[int, list[Box]] = {}
        self._specs = specs
        for region in regions:
            self._cells[region.tensor] += region.cells
            box = bounding_box(region, self._shapes[region.tensor])
            self._boxes.setdefault(region.tensor, []).append(box)

    def whole(self, number: int) -> bool:
        """True where the tensor is held entirely."""
        return self._cells[number] >= self._specs[number].cells

    def touches(self, region: Region) -> bool:
        """False only if nothing of the region is held."""
        boxes = self._boxes.get(region.tensor)
        if not boxes or self.whole(region.tensor):
            return bool(boxes)
        mine = bounding_box(region, self._shapes[region.tensor])
        return any(overlap(mine, box) for box in boxes)


@dataclass(frozen=True)
class Duty:
    """What one rank adds to the group's proof: numbers of its held regions, and tensors that it keeps in host memory
    because no rank's engine shows all of them exactly once.
    """

    counted: tuple[int, ...]
    kept: tuple[int, ...]


def share_duties(specs: Sequence[TensorSpec], ranks: Sequence[Sequence[Region]]) -> list[Duty]:
    """Every canonical cell is counted by exactly one rank.

    Of equal regions the first rank's counts. A tensor whose distinct regions overlap or leave gaps is kept whole by
    rank 0.
    """
    found: list[dict[Region, tuple[int, int]]] = [{} for _ in specs]
    for rank, regions in enumerate(ranks):
        for number, region in enumerate(regions):
            found[region.tensor].setdefault(region, (rank, number))
    counted: list[list[int]] = [[] for _ in ranks]
    kept: list[int] = []
    for tensor, owners in enumerate(found):
        if not _is_cover(specs[tensor], list(owners)):
            kept.append(tensor)
            continue
        for rank, number in owners.values():
            counted[rank].append(number)
    return [Duty(tuple(sorted(mine)), tuple(kept) if not rank else ()) for rank, mine in enumerate(counted)]


def _is_cover(spec: TensorSpec, regions: Sequence[Region]) -> bool:
    if sum(r.cells for r in regions) != spec.cells:
        return False
    boxes = [bounding_box(r, cell_shape(spec)) for r in regions]
    return not any(overlap(a, b) for a, b in combinations(boxes, 2))
