"""Parts: which elements a training tensor and a canonical tensor share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod

import torch

from dcr_s3.errors import BadInput
from dcr_s3.mapping.view import View, merged


@dataclass(frozen=True)
class Part:
    """A box seen twice: ``there`` in canonical tensor ``name`` of ``shape``, ``here`` in a training tensor.

    Both views count elements of row-major tensors, have the same shape and are walked together, so element *i* of
    ``here`` is element *i* of ``there``. ``ties`` are further canonical names of the same storage. Raises ``BadInput``
    where the views do not match.
    """

    name: str
    shape: tuple[int, ...]
    there: View
    here: View
    ties: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.there.shape != self.here.shape:
            raise BadInput(
                f"tensor {self.name}: a part is {list(self.there.shape)} there and {list(self.here.shape)} here"
            )
        if last_element(self.there) >= max(prod(self.shape), 1):
            raise BadInput(f"tensor {self.name}: a part reaches outside its shape {list(self.shape)}")

    def walked(self) -> Part:
        """The same elements in the order of the training tensor's memory, in as few dims as possible."""
        order = sorted(range(len(self.here.shape)), key=lambda d: -self.here.strides[d])
        there, here = merged(self.there.permute(*order), self.here.permute(*order))
        return replace(self, there=there, here=here)

    def chunks(self, most_elements: int) -> Iterator[Part]:
        """Cuts along the walk into parts of at most ``most_elements``, each as large as whole rows allow."""
        if self.there.numel <= most_elements:
            if self.there.numel:
                yield self
            return
        dim = next(d for d in range(len(self.there.shape)) if prod(self.there.shape[d + 1 :]) <= most_elements)
        rows = max(1, most_elements // prod(self.there.shape[dim + 1 :]))
        if dim:
            for index in range(self.there.shape[0]):
                yield from self._narrow(0, index, 1).chunks(most_elements)
            return
        for first in range(0, self.there.shape[0], rows):
            yield self._narrow(0, first, min(rows, self.there.shape[0] - first))

    def _narrow(self, dim: int, start: int, length: int) -> Part:
        there, here = self.there.narrow(dim, start, length), self.here.narrow(dim, start, length)
        if length == 1 and len(there.shape) > 1:
            there, here = there.select(dim, 0), here.select(dim, 0)
        return replace(self, there=there, here=here)


@dataclass(frozen=True)
class Shard:
    """A training tensor of this rank and the canonical elements it holds; elements in no part are never sent.

    ``tensor`` may be on any device and have any strides. It is sent as ``dtype`` (its own by default), rounded to
    nearest even where it is wider. ``eager``: it may change outside of optimizer steps (a buffer), so it is copied when
    publishing begins.
    """

    key: str
    tensor: torch.Tensor
    parts: tuple[Part, ...]
    dtype: torch.dtype
    eager: bool = field(default=False)


def whole(name: str, tensor: torch.Tensor) -> tuple[Part, ...]:
    """A tensor that this rank holds whole."""
    return (Part(name, tuple(tensor.shape), View.of(tensor.shape), View.of(tensor.shape)),)


def last_element(view: View) -> int:
    """Largest element index of a view; -1 for an empty one."""
    if not view.numel:
        return -1
    return view.start + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))
