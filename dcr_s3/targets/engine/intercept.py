"""Runs an engine's loader on real tensors and catches its last copies instead of letting them through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dcr_s3.errors import StateMismatch
from dcr_s3.format.cells import Cells
from dcr_s3.targets.placement import Block, Indices
from dcr_s3.targets.placement_trace import LoadWeights, written_tensors
from dcr_s3.targets.storages import Storages, flat_cells, host, storage_key

aten = torch.ops.aten


@dataclass(frozen=True)
class Caught:
    """One copy that did not reach engine storage: ``cells`` spans the same elements, from ``start`` on."""

    storage: int
    start: int
    elements: int
    cells: torch.Tensor

    def at(self, places: Indices) -> Cells:
        """The caught cells at these elements of the storage."""
        return host(self.cells)[places - self.start]


class _Catcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, storages: Storages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.caught: list[Caught] = []
        self._storages = storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for target in written_tensors(func, args, kwargs):
            number = self._storages.numbers.get(storage_key(target))
            if number is None:
                continue
            # The same kernel on the same strides: conversions of NaN may differ between a kernel's vector and its tail.
            scratch = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device=target.device)
            func(scratch, *args[1:], **kwargs)
            cells = flat_cells(scratch)
            self.caught.append(Caught(number, int(target.storage_offset()), target.numel(), cells))
            return target
        return func(*args, **kwargs)


def catch(load_weights: LoadWeights, storages: Storages, weights: Iterable[tuple[str, torch.Tensor]]) -> list[Caught]:
    """The final copies of some tensors, in the loader's order."""
    catcher = _Catcher(storages)
    with torch.no_grad(), catcher:
        load_weights(weights)
    return catcher.caught


def find(caught: Iterable[Caught], block: Block, name: str) -> Caught:
    """The copy that fills a block. Raises ``StateMismatch`` if the loader no longer makes it."""
    for one in reversed(list(caught)):
        if one.storage == block.storage and one.start == block.start and one.elements == block.region.cells:
            return one
    raise StateMismatch(
        f"tensor {name}: the engine's loader places it differently than when it was bound; bind it again"
    )


@contextmanager
def shadowed(storages: Storages, numbers: Iterable[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Inside, the engine's tensors in these storages lie in copies whose bits are all flipped; yields the copies."""
    copies = {n: storages.items[n].cells.bitwise_not() for n in numbers}
    with storages.replaced(copies):
        yield copies
