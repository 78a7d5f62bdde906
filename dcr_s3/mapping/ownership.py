"""Who compares and sends what: every element of every canonical tensor has exactly one owner among the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from dcr_s3.errors import BadInput
from dcr_s3.format.dtypes import DTYPES
from dcr_s3.format.limits import BLOCK_DENSE_BYTES, REGION_DIMS
from dcr_s3.format.region import Region
from dcr_s3.mapping.cover import first_fault
from dcr_s3.mapping.part import Part
from dcr_s3.mapping.view import View, element_set, merged

SHARES = 16
"""Replicated parts are cut into at least this many pieces per rank, so that their bytes spread evenly."""

LEAST_PIECE_BYTES = 1 << 12


@dataclass(frozen=True)
class Held:
    """A part that one rank holds: ``key`` is the training tensor's, ``dtype`` the canonical one's (safetensors)."""

    key: str
    dtype: str
    part: Part


Groups = dict[tuple[str, View], dict[int, Held]]
"""By canonical name and set of elements: what each rank holds of it."""


@dataclass(frozen=True)
class Side:
    """Where a rank has a piece: ``here`` is a view of the training tensor ``key``."""

    key: str
    here: View


@dataclass(frozen=True)
class Piece:
    """A box of canonical tensor ``name`` of at most a block's size: ``sides[rank]`` for every rank that holds it."""

    name: str
    dtype: str
    there: View
    sides: Mapping[int, Side]
    owner: int

    @property
    def size_bytes(self) -> int:
        return self.there.numel * DTYPES[self.dtype].cell_bytes

    def region(self, number: int) -> Region:
        """The piece as it goes on the wire; ``number`` is the tensor's in the run's table."""
        view = merged(self.there)[0]
        if len(view.shape) > REGION_DIMS:
            raise BadInput(f"tensor {self.name}: a part needs {len(view.shape)} dims, at most {REGION_DIMS} are sent")
        return Region(number, view.start, view.shape, view.strides)


@dataclass(frozen=True)
class Table:
    """The canonical tensors that a layout speaks of: dtype, shape and tied names by name."""

    dtypes: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    ties: Mapping[str, tuple[str, ...]]


def table_of(ranks: Sequence[Sequence[Held]]) -> Table:
    """The canonical tensors of a layout. Raises ``BadInput`` where ranks contradict each other."""
    dtypes: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    ties: dict[str, tuple[str, ...]] = {}
    for rank, layout in enumerate(ranks):
        for held in layout:
            name = held.part.name
            mine = (held.dtype, held.part.shape)
            known = (dtypes.setdefault(name, mine[0]), shapes.setdefault(name, mine[1]))
            if known != mine:
                raise BadInput(
                    f"tensor {name}: is {mine[0]} {list(mine[1])} on rank {rank}, "
                    f"{known[0]} {list(known[1])} on another rank"
                )
            ties[name] = tuple(dict.fromkeys((*ties.get(name, ()), *held.part.ties)))
    return Table(dtypes, shapes, ties)


def assign(ranks: Sequence[Sequence[Held]]) -> list[Piece]:
    """Cuts and assigns all parts. A function of its argument alone, so every rank computes the same.

    ``ranks[r]`` is what rank ``r`` holds. What one rank alone holds is its own; what several hold goes, largest first,
    to whichever of them has the fewest bytes so far. Raises ``BadInput`` naming the tensor where two ranks hold parts
    that overlap without being the same, or where an element is held by nobody.
    """
    groups: Groups = {}
    for rank, layout in enumerate(ranks):
        for held in layout:
            if held.part.there.numel:
                group = groups.setdefault((held.part.name, element_set(held.part.there)), {})
                group.setdefault(rank, held)  # the same elements twice on one rank are tied storage
    _check_cover(groups, table_of(ranks))
    total = sum(_bytes(next(iter(group.values()))) for group in groups.values())
    fine = min(max(LEAST_PIECE_BYTES, total // (SHARES * len(ranks))), BLOCK_DENSE_BYTES)
    loads = [0] * len(ranks)
    pieces: list[Piece] = []
    for group in groups.values():
        pieces += _cut(group, BLOCK_DENSE_BYTES if len(group) == 1 else fine)
    for piece in pieces:
        loads[piece.owner] += piece.size_bytes if len(piece.sides) == 1 else 0
    assigned = [p for p in pieces if len(p.sides) == 1]
    shared = [p for p in pieces if len(p.sides) > 1]
    for piece in sorted(shared, key=lambda p: (-p.size_bytes, p.name, p.there.start)):
        owner = min(piece.sides, key=lambda rank: (loads[rank], rank))
        loads[owner] += piece.size_bytes
        assigned.append(replace(piece, owner=owner))
    return sorted(assigned, key=lambda p: (p.name, p.there.start))


def _cut(group: Mapping[int, Held], limit_bytes: int) -> list[Piece]:
    """The elements of one group in pieces, each with its place on every rank that walks them in the first one's
    order.
    """
    first = next(iter(group.values()))
    limit = limit_bytes // DTYPES[first.dtype].cell_bytes
    cuts: dict[Held, list[Part]] = {}
    for held in group.values():
        if held not in cuts:
            cuts[held] = list(held.part.walked().chunks(limit))
    places = [part.there for part in cuts[first]]
    same = {held for held, parts in cuts.items() if [p.there for p in parts] == places}
    return [
        Piece(
            first.part.name,
            first.dtype,
            there,
            {rank: Side(held.key, cuts[held][number].here) for rank, held in group.items() if held in same},
            next(iter(group)),
        )
        for number, there in enumerate(places)
    ]


def _bytes(held: Held) -> int:
    return held.part.there.numel * DTYPES[held.dtype].cell_bytes


def _check_cover(groups: Groups, table: Table) -> None:
    boxes: dict[str, list[View]] = {name: [] for name in table.shapes}
    for name, box in groups:
        boxes[name].append(box)
    for name, shape in table.shapes.items():
        fault = first_fault(boxes[name], prod(shape))
        if fault is None:
            continue
        kind, index = fault
        holders = sorted(
            {rank for (n, box), group in groups.items() if n == name and contains(box, index) for rank in group}
        )
        if kind == "missing":
            raise BadInput(f"tensor {name}: element {index} of {list(shape)} is held by no rank; check its mapping")
        raise BadInput(
            f"tensor {name}: element {index} of {list(shape)} is in parts that overlap without being the same "
            f"(ranks {', '.join(map(str, holders))}); check its mapping"
        )


def contains(box: View, index: int) -> bool:
    """Whether an ascending box (see ``element_set``) holds an element. Exact where its dims nest, as dims of one
    tensor do.
    """
    rest = index - box.start
    for extent, stride in zip(box.shape, box.strides, strict=True):
        step = min(rest // stride, extent - 1) if stride else 0
        if step < 0:
            return False
        rest -= step * stride
    return rest == 0
