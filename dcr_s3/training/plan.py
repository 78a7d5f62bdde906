"""What all ranks hold, told to all ranks, and who owns what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcr_s3.errors import BadInput
from dcr_s3.format.cells import Cells
from dcr_s3.format.region import Region
from dcr_s3.format.run import Run
from dcr_s3.mapping.cells import dtype_name
from dcr_s3.mapping.group import Group
from dcr_s3.mapping.ownership import Held, Piece, Table, assign, table_of
from dcr_s3.mapping.part import Part, Shard
from dcr_s3.mapping.read import Reader
from dcr_s3.mapping.view import View


@dataclass(frozen=True)
class Plan:
    """All pieces, in one order on all ranks, and this rank's own with their regions on the wire."""

    table: Table
    pieces: tuple[Piece, ...]
    rank: int
    layout: Mapping[str, tuple[Part, ...]]

    def own(self, run: Run) -> list[tuple[Piece, Region]]:
        """This rank's pieces, by training tensor."""
        numbers = {spec.name: number for number, spec in enumerate(run.tensors)}
        mine = sorted((p for p in self.pieces if p.owner == self.rank), key=lambda p: p.sides[self.rank].key)
        return [(piece, piece.region(numbers[piece.name])) for piece in mine]

    def check(self, shards: Iterable[Shard]) -> None:
        """Raises ``BadInput`` for a training tensor that is not cut as it was when the run was opened."""
        for shard in shards:
            if self.layout.get(shard.key) != shard.parts:
                raise BadInput(
                    f"training tensor {shard.key}: holds other parts than when the run was opened; open it again"
                )

    def read(self, piece: Piece, reader: Reader) -> Cells:
        """A piece's cells as this rank has them."""
        side = piece.sides[self.rank]
        return reader.cells(side.key, side.here, piece.dtype)


def make_plan(shards: Sequence[Shard], run: Run | None, group: Group) -> Plan:
    """Collective. Raises ``BadInput`` for a layout that leaves anything of the run out, or anything in twice, or names
    what the run does not have; ``OwnerFailed`` where it is another rank's.
    """
    held = group.together(lambda: _held(shards, run))
    ranks = [[_from_json(item) for item in answer] for answer in group.gather([_to_json(h) for h in held])]
    table = table_of(ranks)
    absent = [spec.name for spec in run.tensors if spec.name not in table.shapes] if run is not None else []
    if absent:
        raise BadInput(f"tensor {absent[0]} of the run (and {len(absent) - 1} more) is in no rank's layout")
    return Plan(table, tuple(assign(ranks)), group.rank, {shard.key: shard.parts for shard in shards})


def _held(shards: Sequence[Shard], run: Run | None) -> list[Held]:
    if run is None:
        return [Held(s.key, dtype_name(s.dtype), part) for s in shards for part in s.parts]
    numbers = {name: number for number, t in enumerate(run.tensors) for name in (t.name, *t.aliases)}
    held = []
    for shard in shards:
        for part in shard.parts:
            found = dict.fromkeys(numbers[name] for name in (part.name, *part.ties) if name in numbers)
            if not found:
                raise BadInput(f"tensor {part.name}: unknown to the run, which has {len(run.tensors)} tensors")
            for number in found:
                spec = run.tensors[number]
                if part.shape != spec.shape:
                    raise BadInput(
                        f"tensor {spec.name}: is {list(part.shape)} in training, the run has {list(spec.shape)}"
                    )
                held.append(Held(shard.key, spec.dtype, Part(spec.name, spec.shape, part.there, part.here)))
    return held


def _to_json(held: Held) -> list[Any]:
    part = held.part
    there, here = part.there, part.here
    return [
        held.key, held.dtype, part.name, part.shape, part.ties,
        there.start, there.shape, there.strides, here.start, here.strides,
    ]  # fmt: skip


def _from_json(item: Sequence[Any]) -> Held:
    key, dtype, name, shape, ties, start, box, strides, here_start, here_strides = item
    there = View(start, tuple(box), tuple(strides))
    here = View(here_start, tuple(box), tuple(here_strides))
    return Held(key, dtype, Part(name, tuple(shape), there, here, tuple(ties)))


def by_key(shards: Sequence[Shard]) -> Mapping[str, Shard]:
    """Shards by key. Raises ``BadInput`` for a key that comes twice."""
    result: dict[str, Shard] = {}
    for shard in shards:
        if shard.key in result:
            raise BadInput(f"training tensor {shard.key}: described twice")
        result[shard.key] = shard
    return result
