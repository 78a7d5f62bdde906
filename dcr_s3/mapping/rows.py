"""Fused and cut tensors as rows: which canonical rows a training tensor's rows are, one stretch after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from dcr_s3.errors import BadInput
from dcr_s3.mapping.part import Part
from dcr_s3.mapping.view import View


@dataclass(frozen=True)
class Rows:
    """``count`` rows of canonical tensor ``name``, of ``shape``, from row ``first``; padding where ``name`` is None.

    Rows run along dim 0. With ``dim`` 1 a "row" is a column: one index of dim 1 over all of dim 0.
    """

    name: str | None
    shape: tuple[int, ...]
    first: int
    count: int

    @classmethod
    def all(cls, name: str, shape: Sequence[int]) -> Rows:
        """Every row of a tensor."""
        return cls(name, tuple(shape), 0, shape[0])

    @classmethod
    def padding(cls, count: int) -> Rows:
        """Rows that are never sent."""
        return cls(None, (), 0, count)


def stacked(stretches: Iterable[Rows], *, first: int = 0, count: int | None = None) -> tuple[Part, ...]:
    """Parts of a training tensor that holds rows ``first`` to ``first + count`` of all ``stretches`` put together.

    Without ``count``, all of them. Raises ``BadInput`` for a stretch outside of its tensor.
    """
    return tuple(_stacked(stretches, first, count))


def _stacked(stretches: Iterable[Rows], first: int, count: int | None) -> Iterator[Part]:
    last = None if count is None else first + count
    passed = at = 0
    for rows in stretches:
        low = max(first - passed, 0)
        high = rows.count if last is None else min(rows.count, last - passed)
        passed += rows.count
        if low >= high:
            continue
        width = prod(rows.shape[1:])
        if rows.name is not None:
            if not 0 <= rows.first <= rows.first + rows.count <= rows.shape[0]:
                raise BadInput(
                    f"tensor {rows.name}: rows {rows.first} to {rows.first + rows.count} of {list(rows.shape)}"
                )
            there = View((rows.first + low) * width, (high - low, width), (width, 1))
            # Padding has no width of its own; the rows of one training tensor all have the same.
            here = View(at * width, (high - low, width), (width, 1))
            yield Part(rows.name, rows.shape, there, here)
        at += high - low


def columns(name: str, shape: Sequence[int], first: int, count: int, *, dim: int = 1) -> tuple[Part, ...]:
    """Parts of a training tensor that holds indices ``first`` to ``first + count`` of one dim, all of the others."""
    there = View.of(shape).narrow(dim, first, count)
    return (Part(name, tuple(shape), there, View.of(there.shape)),) if there.numel else ()
