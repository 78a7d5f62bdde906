"""The trainer's ranks among themselves: small metadata over torch.distributed, never weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from dcr_s3.errors import OwnerFailed

T = TypeVar("T")


class Group:
    """All ranks of the training job, over a gloo group of their own; a single process where none is initialised.

    A group of its own lets a background thread talk while training uses other groups. Every method is a collective:
    all ranks call it in the same order. ``sent_bytes`` counts what this rank has put into them.
    """

    def __init__(self, timeout_s: float = 600.0) -> None:
        """Collective. ``timeout_s`` bounds every later call; a rank that does not come then makes it fail."""
        self.rank, self.size = 0, 1
        self.sent_bytes = 0
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def gather(self, item: Any) -> list[Any]:
        """What every rank gave, in order of ranks. Items are JSON values."""
        if self._group is None:
            return [item]
        body = torch.frombuffer(bytearray(json.dumps(item).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with _named():
            dist.all_gather(sizes, torch.tensor([body.numel()]), group=self._group)
            most = max(int(size) for size in sizes)
            padded = torch.zeros(most, dtype=torch.uint8)
            padded[: body.numel()] = body
            bodies = [torch.empty(most, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(bodies, padded, group=self._group)
        self.sent_bytes += most + 8
        return [json.loads(bytes(b[: int(size)].numpy())) for b, size in zip(bodies, sizes, strict=True)]

    def from_first(self, item: Any) -> Any:
        """What rank 0 gave."""
        return self.gather(item if self.rank == 0 else None)[0]

    def sums(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Element by element, the sum over all ranks modulo 2**64; all ranks give as many."""
        mine = torch.from_numpy(values.view(np.int64).copy())
        if self._group is not None:
            with _named():
                dist.all_reduce(mine, group=self._group)
            self.sent_bytes += values.nbytes
        return mine.numpy().view(np.uint64)

    def from_first_of(self, action: Callable[[], T]) -> T:
        """Collective. What ``action``, a JSON value, came to on rank 0, which alone runs it."""
        result = self.together(lambda: action() if self.rank == 0 else None)
        chosen: T = self.from_first(result)
        return chosen

    def together(self, action: Callable[[], T]) -> T:
        """Collective. Runs ``action`` on every rank; if it fails on any, it fails on all, naming the rank."""
        error: Exception | None = None
        try:
            result = action()
        except Exception as own:
            error = own
        problems = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise OwnerFailed(f"rank {rank} failed: {problem}")
        return result

    def close(self) -> None:
        """Lets go of the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


@contextmanager
def _named() -> Iterator[None]:
    """Says what a failed collective means."""
    try:
        yield
    except RuntimeError as error:
        raise OwnerFailed(f"not all ranks of the trainer answered; one may be dead ({error})") from error
