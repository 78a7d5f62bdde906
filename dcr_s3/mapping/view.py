"""A view: a strided box over the flat, row-major elements of a tensor, reshaped and cut without touching memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class View:
    """Elements ``start + sum(i[d] * strides[d])`` for all ``i`` in ``shape``, last dim fastest.

    The methods are torch's of the same names; a dim counts from 0 or, negative, from the end. They raise ValueError
    where torch would, or where the result would not be a strided box.
    """

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> View:
        """All of a tensor of this shape, row-major."""
        strides = [1] * len(shape)
        for dim in reversed(range(len(shape) - 1)):
            strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
        return cls(0, tuple(shape), tuple(strides))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def narrow(self, dim: int, start: int, length: int) -> View:
        """``length`` indices of one dim from ``start``."""
        dim = self._dim(dim)
        if start < 0 or length < 0 or start + length > self.shape[dim]:
            raise ValueError(f"narrow({dim}, {start}, {length}) reaches outside {list(self.shape)}")
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return View(self.start + (start * self.strides[dim] if length else 0), shape, self.strides)

    def select(self, dim: int, index: int) -> View:
        """One index of a dim, which goes away."""
        dim = self._dim(dim)
        cut = self.narrow(dim, index, 1)
        return View(cut.start, cut.shape[:dim] + cut.shape[dim + 1 :], cut.strides[:dim] + cut.strides[dim + 1 :])

    def unflatten(self, dim: int, sizes: Sequence[int]) -> View:
        """One dim as several, row-major."""
        dim = self._dim(dim)
        if prod(sizes) != self.shape[dim]:
            raise ValueError(f"unflatten of a dim of {self.shape[dim]} into {list(sizes)}")
        inner = View.of(sizes)
        return View(
            self.start,
            (*self.shape[:dim], *sizes, *self.shape[dim + 1 :]),
            (*self.strides[:dim], *(s * self.strides[dim] for s in inner.strides), *self.strides[dim + 1 :]),
        )

    def permute(self, *dims: int) -> View:
        """The dims in another order."""
        if sorted(dims) != list(range(len(self.shape))):
            raise ValueError(f"permute{dims} of {len(self.shape)} dims")
        return View(self.start, tuple(self.shape[d] for d in dims), tuple(self.strides[d] for d in dims))

    def _dim(self, dim: int) -> int:
        if not -len(self.shape) <= dim < len(self.shape):
            raise ValueError(f"dim {dim} of {len(self.shape)}")
        return dim % len(self.shape)


def merged(*views: View) -> tuple[View, ...]:
    """Views of one shape, walked together, with as few dims as all of them allow; at least one."""
    shape: list[int] = []
    strides: list[list[int]] = [[] for _ in views]
    for dim, extent in enumerate(views[0].shape):
        steps = [v.strides[dim] for v in views]
        if extent == 1:
            continue
        if shape and all(s[-1] == extent * step for s, step in zip(strides, steps, strict=True)):
            shape[-1] *= extent
            for s, step in zip(strides, steps, strict=True):
                s[-1] = step
        else:
            shape.append(extent)
            for s, step in zip(strides, steps, strict=True):
                s.append(step)
    if not shape:
        return tuple(View(v.start, (1,), (1,)) for v in views)
    return tuple(View(v.start, tuple(shape), tuple(s)) for v, s in zip(views, strides, strict=True))


def element_set(view: View) -> View:
    """The same elements in ascending order: equal for two views of the same elements, however they walk them."""
    order = sorted(range(len(view.shape)), key=lambda d: -view.strides[d])
    return merged(view.permute(*order))[0]
