#!/usr/bin/env python3
"""Size and speed of the delta codec, beside other published schemes and the machine's limits, in one run.

    scripts/bench_codec.py                              table over the trace and the uniform workload
    scripts/bench_codec.py --pair OLD_DIR NEW_DIR       the same for two checkpoint directories
    scripts/bench_codec.py ... --json                   one JSON object per set (with --pair: one object)

Speeds are dense bytes of one side per second of CPU time of one thread, the best of several rounds in which all
contenders take turns. Encoding counts comparing, coding, both digests of the changes and applying them to the baseline;
decoding counts decoding, both digests and applying. What is applied are the old values, so that every round finds
the same state. The limits are memcmp of equal memory and memcpy. Behind each table: where the time of a block goes, and
what is asked of the codec beside what it reached.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from codec_data import BLOCK_BYTES, Block, Pair, blocks, checkpoint_pairs, floors, trace_pairs, uniform_pairs
from codec_goals import goals, print_goals, print_profile, profile, stages
from codec_peers import PEERS, Peer

from dcr_s3.delta import (
    Changes,
    EncodedBlock,
    apply_changes,
    decode_block,
    digest_at,
    encode_block,
    kernel_name,
    tensor_key,
)
from dcr_s3.delta.changes import Cells
from dcr_s3.delta.fields import Fields
from dcr_s3.format.dtypes import DTYPES

KEY = tensor_key("bench", DTYPES["BF16"], (1,))
SETS = {
    "uniform 1 %": lambda trace: uniform_pairs(trace, 0.01),
    "uniform 3 %": lambda trace: uniform_pairs(trace, 0.03),
    "uniform 5 %": lambda trace: uniform_pairs(trace, 0.05),
    "real lr 1e-6": lambda trace: trace_pairs(trace, "lr1e-6", 2),
    "real lr 5e-6": lambda trace: trace_pairs(trace, "lr5e-6", 2),
    "real lr 2e-5, scaled": lambda trace: trace_pairs(trace, "lr2e-5_scaled", 1),
}


def digest_and_apply(block: Block, changes: Changes) -> None:
    """What both sides do with a block's changes besides coding them."""
    indices = changes.positions.astype(np.uint64)
    digest_at(KEY, indices, changes.old)
    digest_at(KEY, indices, changes.new)
    apply_changes(block.old, changes.positions, changes.old)


def encode_whole(block: Block, *, context: bool = True) -> EncodedBlock:
    """Everything a sender does with one block."""
    encoded = encode_block(block.dtype, block.old, block.new, context=context)
    digest_and_apply(block, encoded.changes)
    return encoded


def decode_whole(block: Block, encoded: EncodedBlock) -> Changes:
    """Everything a receiver does with one block."""
    changed = len(encoded.changes.positions)
    changes = decode_block(block.dtype, encoded.coding, encoded.payload, changed, block.old)
    digest_and_apply(block, changes)
    return changes


class Race:
    """Contenders that take turns; keeps each one's best time."""

    def __init__(self) -> None:
        self._jobs: dict[str, tuple[Callable[[], object], Callable[[], float], int]] = {}
        self.best_s: dict[str, float] = {}

    def enter(
        self, name: str, job: Callable[[], object], rounds: int, clock: Callable[[], float] = time.thread_time
    ) -> None:
        """``job`` runs in the first ``rounds`` rounds, measured by ``clock``."""
        self._jobs[name] = job, clock, rounds

    def run(self) -> None:
        """All rounds."""
        for turn in range(max(rounds for _, _, rounds in self._jobs.values())):
            for name, (job, clock, rounds) in self._jobs.items():
                if turn < rounds:
                    start = clock()
                    job()
                    self.best_s[name] = min(clock() - start, self.best_s.get(name, float("inf")))


def started_pool(threads: int) -> ThreadPoolExecutor:
    """A pool whose threads run already."""
    pool = ThreadPoolExecutor(threads)
    barrier = threading.Barrier(threads)
    list(pool.map(lambda _: barrier.wait(), range(threads)))
    return pool


def enter_limits(race: Race, parts: Sequence[Block], rounds: int) -> None:
    """memcpy, memcmp, and our encoder on unchanged memory; the first two also with one thread and two, in real time."""
    memcmp = ctypes.CDLL(None).memcmp
    memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    copies = [[piece.copy() for piece in part.old] for part in parts]
    targets = [[np.zeros_like(piece) for piece in part.old] for part in parts]

    def compare(part: Block, copy: Sequence[Cells]) -> None:
        for left, right in zip(part.old, copy, strict=True):
            if memcmp(left.ctypes.data, right.ctypes.data, left.nbytes):
                raise AssertionError("copies differ")

    def copy_all(part: Block, target: Sequence[Cells]) -> None:
        for source, destination in zip(part.old, target, strict=True):
            np.copyto(destination, source)

    def unchanged() -> None:
        for part, copy in zip(parts, copies, strict=True):
            encode_whole(Block(part.dtype, part.old, copy))

    race.enter("memcpy", lambda: list(map(copy_all, parts, targets)), rounds)
    race.enter("compare", lambda: list(map(compare, parts, copies)), rounds)
    race.enter("unchanged", unchanged, rounds)
    for threads in (1, 2):
        pool = started_pool(threads)
        race.enter(f"memcpy_{threads}", lambda p=pool: list(p.map(copy_all, parts, targets)), rounds, time.perf_counter)
        race.enter(f"compare_{threads}", lambda p=pool: list(p.map(compare, parts, copies)), rounds, time.perf_counter)


def enter_threads(race: Race, parts: Sequence[Block], encoded: Sequence[EncodedBlock], rounds: int) -> None:
    """Encoding and decoding with one thread and with two, in real time."""
    for threads in (1, 2):
        pool = started_pool(threads)
        race.enter(f"encode_{threads}", lambda p=pool: list(p.map(encode_whole, parts)), rounds, time.perf_counter)
        race.enter(
            f"decode_{threads}", lambda p=pool: list(p.map(decode_whole, parts, encoded)), rounds, time.perf_counter
        )


def enter_peer(race: Race, name: str, peer: Peer, pairs: Sequence[Pair], rounds: int) -> int:
    """Checks a peer's round trip, enters its two directions and returns its size in bytes."""
    work = [(Fields.of(pair.dtype), pair) for pair in pairs]
    coded = [peer.encode(fields, pair.old, pair.new) for fields, pair in work]
    for (fields, pair), parts in zip(work, coded, strict=True):
        if not np.array_equal(peer.decode(fields, pair.old, parts), pair.new):
            raise AssertionError(f"{name} does not restore {pair.name}")
    race.enter(f"{name} encode", lambda: [peer.encode(f, p.old, p.new) for f, p in work], rounds)
    race.enter(
        f"{name} decode", lambda: [peer.decode(f, p.old, c) for (f, p), c in zip(work, coded, strict=True)], rounds
    )
    return sum(len(part) for parts in coded for part in parts)


def measure(pairs: list[Pair], rounds: int, *, with_peers: bool) -> dict[str, Any]:
    """All figures of one set."""
    parts = list(blocks(pairs))
    floor = floors(pairs)
    changed = max(floor.changed, 1)
    rich = [encode_whole(part) for part in parts]
    free = [encode_whole(part, context=False) for part in parts]
    for part, encoded in zip(parts, rich, strict=True):
        restored = decode_whole(part, encoded)
        if not all(np.array_equal(mine, theirs) for mine, theirs in zip(restored, encoded.changes, strict=True)):
            raise AssertionError("decoding does not restore the changes")
    race = Race()
    enter_limits(race, parts, rounds)
    race.enter("encode", lambda: [encode_whole(part) for part in parts], rounds)
    race.enter("decode", lambda: [decode_whole(*pair) for pair in zip(parts, rich, strict=True)], rounds)
    race.enter("free encode", lambda: [encode_whole(part, context=False) for part in parts], rounds)
    race.enter("free decode", lambda: [decode_whole(*pair) for pair in zip(parts, free, strict=True)], rounds)
    enter_threads(race, parts, rich, rounds)
    for stage, job in stages(parts, rich).items():
        race.enter(f"stage {stage}", job, rounds)
    peers = PEERS if with_peers else {}
    sizes = {name: enter_peer(race, name, peer, pairs, max(rounds // 4, 1)) for name, peer in peers.items()}
    race.run()

    dense_bytes = sum(pair.old.nbytes for pair in pairs)
    stage_s = {name.removeprefix("stage "): time_s for name, time_s in race.best_s.items() if name.startswith("stage ")}
    gbps = {name: dense_bytes / seconds / 1e9 for name, seconds in race.best_s.items()}
    shared = {
        "floor_context_bits": floor.context_bits,
        "floor_free_bits": floor.free_bits,
        "compare_gbps": gbps["compare"],
        "memcpy_gbps": gbps["memcpy"],
    }

    def figures(size_bytes: int, encode: str, decode: str) -> dict[str, float]:
        bits = 8 * size_bytes / changed
        return {"bits_per_change": bits, "encode_gbps": gbps[encode], "decode_gbps": gbps[decode], **shared}

    return {
        **figures(sum(len(block.payload) for block in rich), "encode", "decode"),
        "density": floor.changed / max(floor.cells, 1),
        "changed": floor.changed,
        "dense_bytes": dense_bytes,
        "kernels": kernel_name(),
        "codings": sorted({block.coding.name for block in rich}),
        "context_free": figures(sum(len(block.payload) for block in free), "free encode", "free decode"),
        "unchanged_gbps": gbps["unchanged"],
        "threads": {
            f"{job}_{count}": gbps[f"{job}_{count}"]
            for job in ("encode", "decode", "compare", "memcpy")
            for count in (1, 2)
        },
        "stages_ms": profile(stage_s, dense_bytes / BLOCK_BYTES, race.best_s["encode"], race.best_s["decode"]),
        "peers": {name: figures(size, f"{name} encode", f"{name} decode") for name, size in sizes.items()},
    }


def print_table(name: str, result: dict[str, Any]) -> None:
    """One set as text."""
    context, free = result["floor_context_bits"], result["floor_free_bits"]
    print(
        f"\n{name}: {100 * result['density']:.3f} % of {result['dense_bytes'] / 1e6:.0f} MB changed; floor with context"
    )
    print(f"{context:.2f} bits a change, without {free:.2f}; memcpy {result['memcpy_gbps']:.1f} GB/s,", end=" ")
    print(f"compare {result['compare_gbps']:.1f}, our encoder on unchanged memory {result['unchanged_gbps']:.1f}")
    print(f"{'scheme':24}{'bits':>8}{'x floor':>9}{'x free':>8}{'encode':>9}{'decode':>9}   GB/s")
    rows = {"dcr, with context": result, "dcr, context free": result["context_free"], **result["peers"]}
    for scheme, row in rows.items():
        bits = row["bits_per_change"]
        print(f"{scheme:24}{bits:8.2f}{bits / context:9.3f}{bits / free:8.3f}", end="")
        print(f"{row['encode_gbps']:9.2f}{row['decode_gbps']:9.2f}")
    threads = result["threads"]
    for job in ("encode", "decode", "compare", "memcpy"):
        one, two = threads[f"{job}_1"], threads[f"{job}_2"]
        print(f"{job}, threads 1 and 2: {one:.2f} and {two:.2f} GB/s of real time, {two / one:.2f} times", end="; ")
    print(f"encode is {result['encode_gbps'] / result['compare_gbps']:.2f} of compare,", end=" ")
    print(f"decode {result['decode_gbps'] / result['memcpy_gbps']:.2f} of memcpy")
    print_profile(result["stages_ms"])
    print_goals(goals(name, result))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_trace = Path(__file__).resolve().parents[1].parent / "shared" / "trace"
    parser.add_argument("--trace", type=Path, default=default_trace, help="directory of the trace of policy versions")
    parser.add_argument("--pair", type=Path, nargs=2, metavar=("OLD_DIR", "NEW_DIR"), help="two checkpoints instead")
    parser.add_argument("--only", default="", help="sets whose name contains this")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--no-peers", action="store_true", help="leave the other schemes out")
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sets: dict[str, Callable[[], list[Pair]]]
    if options.pair:
        sets = {"pair": lambda: checkpoint_pairs(*options.pair)}
    else:
        sets = {name: lambda load=load: load(options.trace) for name, load in SETS.items() if options.only in name}
    for name, load in sets.items():
        result = measure(load(), options.rounds, with_peers=not options.no_peers)
        if options.json:
            judged = [{**goal._asdict(), "met": goal.met} for goal in goals(name, result)]
            print(json.dumps(result if options.pair else {"set": name, **result, "goals": judged}), flush=True)
        else:
            print_table(name, result)


if __name__ == "__main__":
    main()
