"""Megatron's layouts in words: parallel cuts, fused and gated matrices, experts, padding, pipeline stages.

All return the parts of one rank's tensor. Shapes are those of the whole canonical tensors; an ``Axis`` is this rank's
place in a parallel group.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dcr_s3.errors import BadInput
from dcr_s3.mapping.part import Part
from dcr_s3.mapping.rows import Rows, columns, stacked
from dcr_s3.mapping.view import View

Parts = tuple[Part, ...]


@dataclass(frozen=True)
class Axis:
    """Place ``rank`` of ``size`` in a parallel group."""

    rank: int = 0
    size: int = 1

    def share(self, name: str, extent: int) -> tuple[int, int]:
        """First index and length of this rank's even share. Raises ``BadInput`` where it is not even."""
        if extent % self.size:
            raise BadInput(f"tensor {name}: {extent} rows or columns do not divide by {self.size} ranks")
        length = extent // self.size
        return self.rank * length, length


ALONE = Axis()


def replicated(name: str, shape: Sequence[int]) -> Parts:
    """The same on every rank: norms, biases of row-parallel layers, routers."""
    return (Part(name, tuple(shape), View.of(shape), View.of(shape)),)


def column_parallel(name: str, shape: Sequence[int], tp: Axis) -> Parts:
    """Cut along dim 0; biases too."""
    first, count = tp.share(name, shape[0])
    return stacked([Rows.all(name, shape)], first=first, count=count)


def row_parallel(name: str, shape: Sequence[int], tp: Axis) -> Parts:
    """Cut along dim 1."""
    return columns(name, shape, *tp.share(name, shape[1]))


def transposed(name: str, shape: Sequence[int]) -> Parts:
    """A matrix kept as its transpose (Conv1D): the canonical tensor of ``shape`` is (out, in), the training one (in,
    out).
    """
    there = View.of(shape).permute(1, 0)
    return (Part(name, tuple(shape), there, View.of(there.shape)),)


def vocabulary(name: str, shape: Sequence[int], tp: Axis, *, padded_rows: int) -> Parts:
    """Cut along dim 0 of ``padded_rows`` rows, of which only the canonical tensor's are sent."""
    first, count = tp.share(name, padded_rows)
    return stacked([Rows.all(name, shape), Rows.padding(padded_rows - shape[0])], first=first, count=count)


def gated(gate: str, up: str, shape: Sequence[int], tp: Axis, *, interleave: int | None = None) -> Parts:
    """Gate and up matrices of one ``shape`` in one tensor.

    Each rank holds its rows of the gate, then its rows of the up matrix; with ``interleave``, so many rows of the one
    and of the other in turn.
    """
    first, count = tp.share(gate, shape[0])
    step = interleave or count
    if count % step:
        raise BadInput(f"tensor {gate}: {count} rows per rank do not divide by {step}")
    whole = tuple(shape)
    return stacked(Rows(name, whole, at, step) for at in range(first, first + count, step) for name in (gate, up))


@dataclass(frozen=True)
class Attention:
    """Sizes of a fused query, key and value matrix: per group its query heads, then its key, then its value head.

    ``gate``: with an output gate, a group has as many gate heads after its query heads; they are a canonical tensor of
    that name, or, if it is the query's own name, follow each query head inside it.
    """

    query: str
    key: str
    value: str
    heads: int
    groups: int
    head_rows: int
    row_shape: tuple[int, ...]
    gate: str | None = None


def fused_qkv(a: Attention, tp: Axis) -> Parts:
    """This rank's rows of the fused matrix, or of its bias (``row_shape`` is empty then).

    With fewer groups than ranks a group is cut between ranks. Raises ``BadInput`` where it does not divide.
    """
    if a.heads % a.groups:
        raise BadInput(f"tensor {a.query}: {a.heads} heads do not divide by {a.groups} groups")
    per_group = a.heads // a.groups * (2 if a.gate is not None else 1) + 2
    first, count = tp.share(a.query, per_group * a.groups * a.head_rows)
    return stacked(_qkv_rows(a), first=first, count=count)


def _qkv_rows(a: Attention) -> Iterator[Rows]:
    inside = a.gate == a.query
    query = (a.heads * a.head_rows * (2 if inside else 1), *a.row_shape)
    gate = query if inside else (a.heads * a.head_rows, *a.row_shape)
    pair = (a.groups * a.head_rows, *a.row_shape)
    step = a.head_rows * (2 if inside else 1)
    for group in range(a.groups):
        heads = range(group * a.heads // a.groups, (group + 1) * a.heads // a.groups)
        for head in heads:
            yield Rows(a.query, query, head * step, a.head_rows)
        for head in heads if a.gate is not None else ():
            yield Rows(a.gate, gate, head * step + (a.head_rows if inside else 0), a.head_rows)
        yield Rows(a.key, pair, group * a.head_rows, a.head_rows)
        yield Rows(a.value, pair, group * a.head_rows, a.head_rows)


def stacked_expert(parts: Parts, name: str, expert: int, experts: int) -> Parts:
    """The parts of one expert, described as a tensor of its own, as row ``expert`` of stacked tensor ``name``."""
    result = []
    for part in parts:
        size = View.of(part.shape).numel
        there = View(part.there.start + expert * size, part.there.shape, part.there.strides)
        result.append(Part(name, (experts, *part.shape), there, part.here))
    return tuple(result)


def global_expert(local: int, ep: Axis, experts: int) -> int:
    """Number in the model of this rank's expert ``local`` under expert parallelism."""
    return ep.share("experts", experts)[0] + local


def renumbered(prefix: str, offset: int) -> Callable[[str], str]:
    """Renames a pipeline stage's ``prefix + "0.…"`` to the model's numbers, which start at ``offset`` here."""
    pattern = re.compile(re.escape(prefix) + r"(\d+)(?=\.|$)")
    return lambda name: pattern.sub(lambda m: f"{prefix}{int(m.group(1)) + offset}", name, count=1)
