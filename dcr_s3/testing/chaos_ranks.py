"""Ranks of one trainer as processes of their own: the first commits, all own a part of every tensor."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from dcr_s3.mapping.part import Part, Shard
from dcr_s3.mapping.view import View
from dcr_s3.store.base import Store
from dcr_s3.targets.checkpoint import Checkpoint
from dcr_s3.training import Publisher

ROLES = ("committer", "owner")
"""By rank."""
TIMEOUT_S = 20.0


def publish_as_rank(
    store: Store, rank: int, rendezvous: Path, *, base: Path, weights: Path, state_dir: Path, step: int
) -> None:
    """Publishes the checkpoint in ``weights`` together with the other rank. ``rendezvous`` is a file both can reach.

    Raises ``DcrError`` where the other one is gone.
    """
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=len(ROLES))
    with Publisher.open(
        store, weights, layout=lambda _: shards(weights, rank), base=base, state_dir=state_dir, timeout_s=TIMEOUT_S,
        workers=1,
    ) as publisher:  # fmt: skip
        publisher.step(weights, step=step).result()


def shards(directory: Path, rank: int) -> list[Shard]:
    """A rank's even part of every tensor of a checkpoint of flat bfloat16 tensors."""
    checkpoint = Checkpoint.open(directory)
    made = []
    for name, place in checkpoint.places.items():
        size = place.shape[0] // len(ROLES)
        mine = checkpoint.cells(name)[rank * size : (rank + 1) * size].copy()
        there = View.of(place.shape).narrow(0, rank * size, size)
        tensor = torch.from_numpy(mine.view("<i2")).view(torch.bfloat16)
        made.append(Shard(name, tensor, (Part(name, place.shape, there, View.of((size,))),), tensor.dtype))
    return made
