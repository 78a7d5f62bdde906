#!/usr/bin/env python3
"""Publishing by shards from 1, 2 and 4 ranks, and against gathering the model first.

Every rank of an FSDP2 model compares its own shard; the alternative gathers every tensor to rank 0, which compares the
whole. Same model, same ranks, same codec, same local S3 server, one run:

    .venv/bin/python scripts/bench_trainer.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dcr_s3 import Sender
from dcr_s3.cli.demo.trainer import Trainer
from dcr_s3.cli.output import size
from dcr_s3.cli.tables import table
from dcr_s3.testing.servers import EmbeddedS3
from dcr_s3.training import Publisher, shards_of

RANKS = (1, 2, 4)
REPEATS = 3
DENSITY = 0.01
BF16 = partial(shards_of, dtype=torch.bfloat16)


def build(layers: int, hidden: int) -> nn.Module:
    torch.manual_seed(0)
    layer = [nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)) for _ in range(layers)]
    model = nn.Sequential(*layer)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def update(model: nn.Module, step: int) -> None:
    """Moves one weight in a hundred by one part in a hundred, each rank its own."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local()
            count = max(1, int(local.numel() * DENSITY))
            local.view(-1)[torch.randint(local.numel(), (count,), generator=generator)] *= 1.01


class PeakMemory:
    """Largest resident size of this process above that at the start, sampled, in bytes."""

    def __enter__(self) -> PeakMemory:
        self.start = self.peak = self._resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def extra_bytes(self) -> int:
        return self.peak - self.start

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, self._resident())

    @staticmethod
    def _resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def by_shards(model: nn.Module, url: str) -> dict[str, Any]:
    """Publishes updates by shards; times are of the slowest rank."""
    with PeakMemory() as memory, Publisher.open(url, model, layout=BF16, workers=1, replicas="off") as publisher:
        compared, committed = [], []
        for repeat in range(REPEATS):
            update(model, repeat)
            dist.barrier()
            begun = time.perf_counter()
            published = publisher.step(model)
            dist.barrier()
            compared.append(time.perf_counter() - begun)
            report = published.result()
            committed.append(time.perf_counter() - begun)
        own = publisher.owned_bytes
        metadata = publisher.metadata_bytes
    return {
        "owned_bytes": own, "peak_bytes": memory.extra_bytes, "metadata_bytes": metadata,
        "compared_s": min(compared), "committed_s": min(committed), "wire_bytes": report.wire_bytes,
        "dense_bytes": report.dense_bytes,
    }  # fmt: skip


def by_gathering(model: nn.Module, url: str) -> dict[str, Any]:
    """Gathers every tensor, casts it, and lets rank 0 publish the whole."""

    def tensors() -> Any:
        for name, parameter in model.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            yield name, whole.detach().to(torch.bfloat16)

    base = dict(tensors())
    sender = Sender.open(url, base=base) if dist.get_rank() == 0 else None
    del base
    compared, committed = [], []
    for repeat in range(REPEATS):
        update(model, 10 + repeat)
        dist.barrier()
        begun = time.perf_counter()
        if sender is None:
            for _ in tensors():
                pass
        else:
            with sender.version() as writer:
                for name, tensor in tensors():
                    writer.add(name, tensor, borrow=True)
                writer.scan()
                compared.append(time.perf_counter() - begun)
            committed.append(time.perf_counter() - begun)
        dist.barrier()
    if sender is not None:
        sender.close()
    return {"compared_s": min(compared, default=0.0), "committed_s": min(committed, default=0.0)}


def work(url: str, out: Path, layers: int, hidden: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = build(layers, hidden)
    found = {"shards": by_shards(model, f"{url}/shards"), "gather": by_gathering(model, f"{url}/gather")}
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def step_times(url: str, steps: int = 24) -> tuple[float, float]:
    """Median seconds of one policy update of the demonstration's model on one thread: alone, and while the version
    before is published by another thread. The two kinds alternate.
    """
    torch.set_num_threads(1)
    trainer = Trainer(learning_rate=1e-4)
    times: dict[bool, list[float]] = {False: [], True: []}
    with Publisher.open(url, trainer.model, layout=BF16, workers=1) as publisher:
        publisher.attach(trainer.optimizer)
        for number in range(steps):
            publishes = number % 2 == 1
            if publishes:
                publisher.step(trainer.model)
            begun = time.perf_counter()
            trainer.reinforce()
            times[publishes].append(time.perf_counter() - begun)
            if publishes:
                publisher.wait()
    return median(times[False][1:]), median(times[True][1:])


def launch(ranks: int, server: EmbeddedS3, layers: int, hidden: int) -> list[dict[str, Any]]:
    """What every rank has found."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        subprocess.run(
            [
                *command, __file__, "--work", directory, "--url", f"s3://bench/{ranks}",
                "--layers", str(layers), "--hidden", str(hidden),
            ],
            env={**os.environ, **server.environment, "OMP_NUM_THREADS": "1"},
            check=True,
        )  # fmt: skip
        return [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS, help="how many, in turn")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work is not None:
        work(given.url, given.work, given.layers, given.hidden)
        return
    shown = table(
        "", "ranks", "compared per rank", "peak memory", "metadata", "construction", "by gathering", "ratio",
        "committed", "by gathering",
    )  # fmt: skip
    with EmbeddedS3() as server:
        server.create_bucket("bench")
        for ranks in given.ranks:
            found = launch(ranks, server, given.layers, given.hidden)
            shards, gather = [f["shards"] for f in found], found[0]["gather"]
            shown.add_row(
                str(ranks),
                *(size(max(s[key] for s in shards)) for key in ("owned_bytes", "peak_bytes", "metadata_bytes")),
                f"{shards[0]['compared_s']:.2f} s",
                f"{gather['compared_s']:.2f} s",
                f"{gather['compared_s'] / shards[0]['compared_s']:.1f}",
                f"{shards[0]['committed_s']:.2f} s",
                f"{gather['committed_s']:.2f} s",
            )
    console = Console(width=140)
    if given.ranks:
        console.print(f"{size(shards[0]['dense_bytes'])} in bf16, {size(shards[0]['wire_bytes'])} sent per version")
        console.print(shown)
    with EmbeddedS3() as server:
        server.create_bucket("bench")
        os.environ.update(server.environment)
        alone, publishing = step_times("s3://bench/step")
    console.print(
        f"one policy update of the demonstration: {alone:.3f} s alone, {publishing:.3f} s while publishing "
        f"({publishing / alone - 1:+.1%})"
    )


if __name__ == "__main__":
    main()
