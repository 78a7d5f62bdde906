"""The trainer's ranks among themselves: small metadata over torch.distributed, never weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


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

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Per position, whether any rank's flag is set; all ranks give as many."""
        if self._group is None:
            return list(flags)
        mine = torch.tensor(list(flags), dtype=torch.uint8)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self._group)
        self.sent_bytes += mine.numel()
        return [bool(flag) for flag in mine.tolist()]

    def close(self) -> None:
        """Lets go of the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
