"""Run by every rank: ``worker.py SCENARIO URL DIRECTORY``. A scenario that returns has passed."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))

from tiny import build, full_state, train

from dcr_s3 import Receiver
from dcr_s3.training import Publisher, shards_of

BF16 = partial(shards_of, dtype=torch.bfloat16)


def rank() -> int:
    return dist.get_rank()


def save(directory: Path, state: dict[str, torch.Tensor]) -> None:
    directory.mkdir(parents=True)
    save_file(state, directory / "model.safetensors")


def check(url: str, mirror: Path, expected: dict[str, torch.Tensor], version: int) -> None:
    """Pulls into ``mirror`` and compares every bit. Rank 0 only; the others wait."""
    if rank() == 0:
        assert Receiver(url, mirror).pull().version == version
        found = load_file(mirror / "model.safetensors")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    dist.barrier()


def versions(how: str, url: str, directory: Path) -> None:
    """Several optimizer steps, each published by shards, compared with the gathered model."""
    model = build(how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mirror = directory / f"mirror-{how}"
    state = full_state(model)
    if rank() == 0:
        save(mirror, state)
    with Publisher.open(f"{url}/{how}", model, layout=BF16, replicas="full") as publisher:
        publisher.attach(optimizer)
        for step in range(1, 4):
            train(model, optimizer, step)
            expected = full_state(model)
            publisher.step(model, step)
            train_ahead = step == 2
            if train_ahead:
                train(model, optimizer, 100)
            report = publisher.wait()
            assert report.step == step
            assert report.changed_elements > 0
            check(f"{url}/{how}", mirror, expected, report.version)


def main() -> None:
    scenario, url, directory = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        name, _, argument = scenario.partition(":")
        for one in argument.split(","):
            globals()[name](one, url, Path(directory))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
