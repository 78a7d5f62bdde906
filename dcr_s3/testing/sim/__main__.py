"""``python -m dcr_s3.testing.sim``: replays a seed, runs many, or explores a small scenario."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from dataclasses import asdict

from dcr_s3.testing.sim.scenarios import (
    FAULT_RATE,
    Making,
    Tiny,
    explore_tiny,
    joint_scenario,
    long_scenario,
    run_seed,
)
from dcr_s3.testing.sim.simulation import Violation


def main() -> int:
    """Returns 1 where a promise was broken."""
    parser = argparse.ArgumentParser(prog="scripts/sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay one seed and print its trace")
    parser.add_argument("--seeds", type=int, default=20, help="run this many seeds (default 20)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument("--joint", action="store_true", help="seeds of a trainer of several ranks and joint release")
    parser.add_argument("--explore", action="store_true", help="try everything in a small scenario instead")
    parser.add_argument("--senders", type=int, default=1)
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--keepers", type=int, default=0, help="machines that fold and make snapshots")
    parser.add_argument("--cleaners", type=int, default=0, help="machines that delete what is not needed")
    parser.add_argument("--earlier", type=int, default=0, help="versions published before")
    parser.add_argument("--faults", type=int, default=1, help="how many faults an explored run may meet (default 1)")
    parser.add_argument("--kinds", help="comma-separated kinds of faults to explore (default: all)")
    parser.add_argument("--requests-only", action="store_true", help="explore no faults at disk writes")
    parser.add_argument("--parts", action="store_true", help="explored senders upload segments in parts")
    parser.add_argument("--fence", action="store_true", help="explored senders commit a fence first")
    parser.add_argument("--json", action="store_true", help="print results as JSON, one object a line")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if arguments.explore:
        return _explore(arguments)
    make = joint_scenario if arguments.joint else long_scenario
    if arguments.seed is not None:
        return _replay(arguments.seed, make, as_json=arguments.json)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    failed = sum(_one(seed, make, as_json=arguments.json) for seed in seeds)
    print(f"{arguments.seeds} seeds, {failed} violations", file=sys.stderr)
    return int(failed > 0)


def _one(seed: int, make: Making, *, as_json: bool) -> bool:
    """Runs one seed; True if it failed."""
    begun = time.monotonic()
    try:
        result = run_seed(seed, make=make)
    except Violation as violation:
        print(json.dumps({"seed": seed, "violation": str(violation)}) if as_json else f"seed {seed}: {violation}")
        return True
    figures = {k: v for k, v in asdict(result).items() if k != "trace"}
    figures |= {"seed": seed, "seconds": round(time.monotonic() - begun, 2)}
    print(json.dumps(figures) if as_json else " ".join(f"{k}={v}" for k, v in figures.items()), flush=True)
    return False


def _replay(seed: int, make: Making, *, as_json: bool) -> int:
    with make(seed, None, FAULT_RATE) as scenario:
        violation = None
        try:
            scenario.run()
        except Violation as error:
            violation = str(error)
        if as_json:
            print(json.dumps({"seed": seed, "trace_hash": scenario.simulation.trace_hash, "violation": violation}))
        else:
            print("\n".join(scenario.simulation.trace))
            print(f"seed {seed}: trace {scenario.simulation.trace_hash}: {violation or 'no violation'}")
    return int(violation is not None)


def _explore(arguments: argparse.Namespace) -> int:
    menu = None if arguments.kinds is None else frozenset(arguments.kinds.split(","))
    tiny = Tiny(
        senders=arguments.senders,
        receivers=arguments.receivers,
        keepers=arguments.keepers,
        cleaners=arguments.cleaners,
        earlier=arguments.earlier,
        faults=arguments.faults,
        fence=arguments.fence,
        parts=arguments.parts,
        menu=menu,
        disk=not arguments.requests_only,
    )
    try:
        figures = asdict(explore_tiny(tiny))
    except Violation as violation:
        print(json.dumps({"violation": str(violation)}) if arguments.json else f"violation: {violation}")
        return 1
    print(json.dumps(figures) if arguments.json else " ".join(f"{k}={v}" for k, v in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
