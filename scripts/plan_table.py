#!/usr/bin/env python3
"""Prints, as Markdown, what the capacity model says of 30B to 1T parameters on the published testbed: 8 nodes a side.

Two links are shown: the nominal 5 Gbit/s of each node, and the 0.66 Gbit/s to which the published full copy amounts
(247.2 GB up and down in 750 s). Everything is a projection, by rates measured on one core of a small machine.

    .venv/bin/python scripts/plan_table.py [--rates rates.json]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dcr_s3.planning.model import Workload, predict, predict_full_copy
from dcr_s3.planning.rates import Rates

MODELS = {"30B": 60e9, "70B": 140e9, "120B": 247.2e9, "405B": 810e9, "1T": 2242e9}
CHANGES = (0.007, 0.01, 0.03, 0.05)
PUBLISHED_S = {("120B", 0.03): 24.5, ("120B", 0.05): 49.7, ("1T", 0.03): 150.0}
LINKS = {"5 Gbit/s": 5e9 / 8, "0.66 Gbit/s": 247.2e9 / 8 / 375}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=Path, help="as `dcr-s3 plan --rates` keeps them")
    parser.add_argument("--cores", type=int, default=16, help="of each node")
    arguments = parser.parse_args()
    rates = Rates() if arguments.rates is None else Rates.from_bytes(arguments.rates.read_bytes(), where="--rates")
    heads = " | ".join(f"{100 * change:g} %" for change in CHANGES)
    print(f"| model | link of a node | full copy | {heads} | published, 3 % and 5 % |")
    print("|---|---|---:|" + "---:|" * len(CHANGES) + "---|")
    for model, dense_bytes in MODELS.items():
        for link, bytes_per_s in LINKS.items():
            print(row(model, dense_bytes, link, bytes_per_s, arguments.cores, rates))


def row(model: str, dense_bytes: float, link: str, bytes_per_s: float, cores: int, rates: Rates) -> str:
    """One model on one link: seconds of a full copy and of each change, the slowest stage in words."""
    work = Workload(
        dense_bytes=int(dense_bytes),
        owners=8,
        receivers=8,
        sharded=True,
        up_bytes_per_s=bytes_per_s,
        down_bytes_per_s=bytes_per_s,
        owner_cores=cores,
        receiver_cores=cores,
    )
    cells = []
    for change in CHANGES:
        refit = predict(work.model_copy(update={"changed_ratio": change}), rates)
        cells.append(f"{refit.seconds['total']:.1f} s ({refit.bound_by})")
    known = [f"{PUBLISHED_S[model, c]:g} s" for c in (0.03, 0.05) if (model, c) in PUBLISHED_S]
    full_s = predict_full_copy(work).seconds["total"]
    return f"| {model} | {link} | {full_s:.0f} s | {' | '.join(cells)} | {', '.join(known)} |"


if __name__ == "__main__":
    main()
