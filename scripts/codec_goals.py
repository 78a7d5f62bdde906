"""What the codec is asked for, what was measured, and the stages that the time of a block goes to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from codec_data import Block

from dcr_s3.delta import EncodedBlock, apply_changes, digest_at, kernels, tensor_key
from dcr_s3.delta.clock import choose_model
from dcr_s3.delta.fields import Fields
from dcr_s3.delta.model import HazardModel, Tally
from dcr_s3.format.codings import Coding
from dcr_s3.format.dtypes import DTYPES

_KEY = tensor_key("bench", DTYPES["BF16"], (1,))
_STRIDE_LOG2 = 6


class Goal(NamedTuple):
    """A measured ratio and what it should be at most, or at least."""

    what: str
    value: float
    asked: float
    at_least: bool

    @property
    def met(self) -> bool:
        """Whether it is, to the two or three digits that it is stated in."""
        return self.value >= self.asked if self.at_least else self.value <= self.asked


def goals(name: str, result: dict[str, Any]) -> list[Goal]:
    """The goals that the set ``name`` is judged by."""
    bits, free, peers = result["bits_per_change"], result["context_free"], result["peers"]
    context_floor, free_floor = result["floor_context_bits"], result["floor_free_bits"]
    found = []
    if name.startswith("real"):
        found.append(Goal("bits, of the floor with context", bits / context_floor, 1.03, False))
        found.append(Goal("bits without context, of their floor", free["bits_per_change"] / free_floor, 1.05, False))
        for peer, limit in (("u16_gaps_xor_zstd1", 0.50), ("dense_xor_zstd1", 0.35)):
            if peer in peers:
                size = peers[peer]["bits_per_change"]
                what = f"bits, of {peer} (the floor is {context_floor / size:.3f} of it)"
                found.append(Goal(what, bits / size, limit, False))
    if name in ("uniform 3 %", "uniform 5 %"):
        found.append(Goal("bits, of the floor", bits / context_floor, 1.02, False))
    return found + (_speed_goals(result) if name == "real lr 5e-6" else [])


def _speed_goals(result: dict[str, Any]) -> list[Goal]:
    threads, compare, peers = result["threads"], result["compare_gbps"], result["peers"]
    found = [
        Goal("encode, of comparing", result["encode_gbps"] / compare, 0.45, True),
        Goal("decode, of memcpy", result["decode_gbps"] / result["memcpy_gbps"], 0.40, True),
        Goal("unchanged blocks, of comparing", result["unchanged_gbps"] / compare, 0.85, True),
    ]
    if "u16_gaps_xor_zstd1" in peers:
        faster = result["encode_gbps"] / peers["u16_gaps_xor_zstd1"]["encode_gbps"]
        found.append(Goal("encode, times the u16 gaps encoder", faster, 6.0, True))
    for job, limit in (("encode", "compare"), ("decode", "memcpy")):
        reached, bound = (threads[f"{what}_2"] / threads[f"{what}_1"] for what in (job, limit))
        found.append(Goal(f"{job}, two threads of one ({limit} reaches {bound:.2f})", reached, 1.8, True))
    return found


def print_goals(found: Sequence[Goal]) -> None:
    """One line each."""
    for goal in found:
        side, verdict = ("at least" if goal.at_least else "at most"), ("met" if goal.met else "NOT MET")
        print(f"  {goal.what}: {goal.value:.3f}, asked {side} {goal.asked}: {verdict}")


class _Work(NamedTuple):
    """One clock-coded block and what its stages take and yield."""

    block: Block
    encoded: EncodedBlock
    fields: Fields
    tally: Tally
    model: HazardModel
    positions: bytes
    signs: bytes
    values: bytes


def _prepared(block: Block, encoded: EncodedBlock) -> _Work:
    kernel, fields = kernels.active(), Fields.of(block.dtype)
    tally = kernel.tally(block.old, block.new, fields, _STRIDE_LOG2)
    model = choose_model(fields, sum(map(len, block.old)), tally, context=True)
    changes, positions = kernel.scan_positions(block.old, block.new, fields, model, tally.density)
    signs, values = kernel.encode_values(changes.old, changes.new, fields, model)
    return _Work(block, encoded, fields, tally, model, positions, signs, values)


def stages(parts: Sequence[Block], encoded: Sequence[EncodedBlock]) -> dict[str, Callable[[], object]]:
    """Jobs that do one stage for all blocks that are coded in one pass by the clock."""
    kernel = kernels.active()
    clocked = (Coding.CLOCK_FREE, Coding.CLOCK_CONTEXT)
    works = [_prepared(*pair) for pair in zip(parts, encoded, strict=True) if pair[1].coding in clocked]

    def each(stage: Callable[[_Work], object]) -> Callable[[], object]:
        return lambda: [stage(work) for work in works]

    def digests(work: _Work) -> None:
        indices = work.encoded.changes.positions.astype(np.uint64)
        digest_at(_KEY, indices, work.encoded.changes.old)
        digest_at(_KEY, indices, work.encoded.changes.new)

    return {
        "tally": each(lambda w: kernel.tally(w.block.old, w.block.new, w.fields, _STRIDE_LOG2)),
        "model": each(lambda w: choose_model(w.fields, sum(map(len, w.block.old)), w.tally, context=True)),
        "compare": each(lambda w: kernel.scan(w.block.old, w.block.new, w.fields.cell_bytes, w.tally.density)),
        "compare and positions": each(
            lambda w: kernel.scan_positions(w.block.old, w.block.new, w.fields, w.model, w.tally.density)
        ),
        "values": each(lambda w: kernel.encode_values(w.encoded.changes.old, w.encoded.changes.new, w.fields, w.model)),
        "decode positions": each(
            lambda w: kernel.decode_positions(
                w.positions, len(w.encoded.changes.positions), w.block.old, w.fields, w.model
            )
        ),
        "decode values": each(
            lambda w: kernel.decode_values(w.signs, w.values, w.encoded.changes.old, w.fields, w.model)
        ),
        "digests": each(digests),
        "apply": each(lambda w: apply_changes(w.block.old, w.encoded.changes.positions, w.encoded.changes.old)),
    }


def profile(seconds: dict[str, float], blocks: float, encode_s: float, decode_s: float) -> dict[str, dict[str, float]]:
    """Milliseconds a block by stage, for encoding and decoding; "rest" is Python, and what stages cost each other."""
    ms = {stage: time_s / blocks * 1e3 for stage, time_s in seconds.items()}
    ms["positions"] = ms["compare and positions"] - ms["compare"]
    encode = {stage: ms[stage] for stage in ("tally", "model", "compare", "positions", "values", "digests", "apply")}
    decode = {stage: ms[stage] for stage in ("decode positions", "decode values", "digests", "apply")}
    encode["rest"] = encode_s / blocks * 1e3 - math.fsum(encode.values())
    decode["rest"] = decode_s / blocks * 1e3 - math.fsum(decode.values())
    return {"encode": encode, "decode": decode}


def print_profile(found: dict[str, dict[str, float]]) -> None:
    """One line for each direction."""
    for job, parts in found.items():
        print(f"  {job}, ms a block of 16 MiB:", ", ".join(f"{stage} {ms:.2f}" for stage, ms in parts.items()))
