#!/usr/bin/env python3
"""How much of a publication's construction hides behind its transport.

Publishes one version to a store in memory, first unthrottled to learn how long construction takes and how many bytes
there are, then through a link on which transport takes as long as construction. Prints, per stage, the intervals in
which it was busy, and the whole publication against the longer of the two:

    .venv/bin/python scripts/bench_overlap.py --size-mb 1024 --changed 0.03
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from dcr_s3 import Sender, init_run
from dcr_s3.delta.kernels import kernel_name
from dcr_s3.store.memory import MemoryStore
from dcr_s3.store.throttled import ThrottledStore

TENSOR_CELLS = 8 << 20


def make_states(size_mb: int, ratio: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Two bf16 states of ``size_mb`` MB; a share ``ratio`` of cells differs by one step up or down."""
    random = np.random.default_rng(1)
    old, new = {}, {}
    for number in range(max(1, size_mb * 1_000_000 // (2 * TENSOR_CELLS))):
        bits = (random.standard_normal(TENSOR_CELLS, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        changed = bits.copy()
        places = random.random(TENSOR_CELLS, np.float32) < ratio
        changed[places] += np.where(random.random(int(places.sum())) < 0.5, 1, 65535).astype(np.uint16)
        old[f"layers.{number}.weight"] = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
        new[f"layers.{number}.weight"] = torch.from_numpy(changed.view(np.int16)).view(torch.bfloat16)
    return old, new


def publish(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor], bytes_per_s: float) -> dict:
    """One publication of ``new`` over ``old``: its report, and the busy intervals by stage."""
    store = MemoryStore()
    base = {name: tensor.clone() for name, tensor in old.items()}
    with tempfile.TemporaryDirectory() as state_dir:
        init_run(store, base)
        link = ThrottledStore(store, bytes_per_s=bytes_per_s, latency_s=0.005)
        with Sender.open(link, base=base, state_dir=Path(state_dir), fence=False) as sender:
            with sender.version() as version:
                for name, tensor in new.items():
                    version.add(name, tensor, borrow=True)
            returned = time.monotonic()
            assert sender.stopped is None  # waits for the baseline
            follows_s = time.monotonic() - returned
            return {**version.report.model_dump(), "unions": version.timeline.unions(), "baseline_follows_s": follows_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mb", type=int, default=1024)
    parser.add_argument("--changed", type=float, default=0.03)
    parser.add_argument("--tries", type=int, default=3, help="the best one is shown")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    old, new = make_states(arguments.size_mb, arguments.changed)
    free = min((publish(old, new, 1e12) for _ in range(arguments.tries)), key=lambda r: r["seconds"]["total"])
    bytes_per_s = free["wire_bytes"] / free["seconds"]["scan_encode"]
    best = min(
        (publish(old, new, bytes_per_s) for _ in range(arguments.tries)),
        key=lambda r: r["seconds"]["total"] / longer_of(r, bytes_per_s),
    )
    longer = longer_of(best, bytes_per_s)
    ratio = best["seconds"]["total"] / longer
    if arguments.json:
        print(json.dumps({"ratio": ratio, "longer_s": longer, "bytes_per_s": bytes_per_s, **best}))
        return
    print(f"{arguments.size_mb} MB, {100 * arguments.changed:g} % changed, kernels: {kernel_name()}")
    print(f"{best['wire_bytes'] / 1e6:.1f} MB on a link of {bytes_per_s / 1e6:.1f} MB/s")
    for stage, spans in best["unions"].items():
        shown = ", ".join(f"{begin:.2f}-{end:.2f}" for begin, end in spans[:12])
        more = f" and {len(spans) - 12} more" if len(spans) > 12 else ""
        print(f"{stage:>12}: {best['seconds'][stage]:6.2f} s  {shown}{more}")
    print(f"{'whole':>12}: {best['seconds']['total']:6.2f} s = {ratio:.2f} x the longer of the two ({longer:.2f} s)")
    print(f"{'baseline':>12}: {best['baseline_follows_s']:6.2f} s in the background, after the version is published")


def longer_of(report: dict, bytes_per_s: float) -> float:
    """The longer of construction's busy time and the bytes' time on the link, in seconds."""
    return max(report["seconds"]["scan_encode"], report["wire_bytes"] / bytes_per_s)


if __name__ == "__main__":
    main()
