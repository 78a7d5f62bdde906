"""Pairs of successive states to measure the codec on, and the entropy that any codec has to spend on them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dcr_s3.delta.changes import CELL_TYPES, Cells
from dcr_s3.delta.fields import Fields
from dcr_s3.format.dtypes import DTYPES, Dtype

BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class Pair:
    """One tensor before and after, as flat cells."""

    name: str
    dtype: Dtype
    old: Cells
    new: Cells


@dataclass(frozen=True)
class Block:
    """Up to 16 MiB of cells of one type, in pieces of consecutive tensors."""

    dtype: Dtype
    old: list[Cells]
    new: list[Cells]


def read_checkpoint(directory: Path) -> dict[str, tuple[Dtype, Cells]]:
    """Every tensor of every safetensors file in ``directory``, in memory."""
    tensors: dict[str, tuple[Dtype, Cells]] = {}
    files = sorted(directory.glob("*.safetensors")) if directory.is_dir() else [directory]
    for path in files:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                dtype = DTYPES[entry["dtype"]]
                first, last = entry["data_offsets"]
                file.seek(8 + header_bytes + first)
                tensors[name] = (
                    dtype,
                    np.fromfile(file, CELL_TYPES[dtype.cell_bytes], (last - first) // dtype.cell_bytes),
                )
    if not tensors:
        raise SystemExit(f"{directory} holds no safetensors file")
    return tensors


def checkpoint_pairs(old: Path, new: Path) -> list[Pair]:
    """The tensors of two checkpoints, which must have the same names, types and sizes."""
    before, after = read_checkpoint(old), read_checkpoint(new)
    if before.keys() != after.keys():
        raise SystemExit(f"{old} and {new} do not hold the same tensors: {sorted(before.keys() ^ after.keys())[:5]}")
    pairs = []
    for name, (dtype, cells) in before.items():
        if after[name][0] != dtype or len(after[name][1]) != len(cells):
            raise SystemExit(f"{name} has another type or size in {new}")
        pairs.append(Pair(name, dtype, cells, after[name][1]))
    return pairs


def trace_pairs(trace: Path, branch: str, step: int) -> list[Pair]:
    """Step ``step`` of a branch of the trace: cells before it, cells after it."""
    state = read_checkpoint(trace / "base.safetensors")
    for number in range(1, step + 1):
        old = {name: cells.copy() for name, (_, cells) in state.items()}
        with np.load(trace / f"{branch}_step{number}.npz") as changes:
            for name, (_, cells) in state.items():
                if f"I/{name}" in changes:
                    cells[np.cumsum(changes[f"I/{name}"].astype(np.int64))] = changes[f"V/{name}"]
    return [Pair(name, dtype, old[name], cells) for name, (dtype, cells) in state.items()]


def uniform_pairs(trace: Path, share: float) -> list[Pair]:
    """The published stress workload on the trace's base: ``share`` of all cells, drawn uniformly, change.

    Seed 0. Each is multiplied by 1 + 0.01 g in float32, g standard normal, and rounded to the nearest bfloat16, ties
    to even; g is drawn anew where that gives the old bits.
    """
    generator = np.random.default_rng(0)
    pairs = []
    for name, (dtype, old) in read_checkpoint(trace / "base.safetensors").items():
        new = old.copy()
        left = np.flatnonzero(generator.random(len(old)) < share)
        left = left[old[left] & 0x7FFF != 0]
        while len(left):
            values = (old[left].astype(np.uint32) << 16).view(np.float32)
            factors = 1 + 0.01 * generator.standard_normal(len(left))
            new[left] = _bfloat16((values * factors).astype(np.float32))
            left = left[new[left] == old[left]]
        pairs.append(Pair(name, dtype, old, new))
    return pairs


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def blocks(pairs: list[Pair]) -> Iterator[Block]:
    """The tensors of each type, walked one after the other and cut every 16 MiB."""
    for dtype in {pair.dtype.name: pair.dtype for pair in pairs}.values():
        room = BLOCK_BYTES // dtype.cell_bytes
        current = Block(dtype, [], [])
        for pair in pairs:
            if pair.dtype != dtype:
                continue
            at = 0
            while at < len(pair.old):
                size = min(room, len(pair.old) - at)
                current.old.append(pair.old[at : at + size])
                current.new.append(pair.new[at : at + size])
                at, room = at + size, room - size
                if not room:
                    yield current
                    current, room = Block(dtype, [], []), BLOCK_BYTES // dtype.cell_bytes
        if current.old:
            yield current


@dataclass(frozen=True)
class Floors:
    """Plug-in entropies per changed cell, and what they were counted on.

    With context: of which cells change, given the old exponent, and of the steps, given the old exponent. Without:
    of which cells change at the mean rate, and of the steps.
    """

    context_bits: float
    free_bits: float
    cells: int
    changed: int


def floors(pairs: list[Pair]) -> Floors:
    """Both floors of ``pairs``."""
    context = free = 0.0
    cells = changed = 0
    for dtype in {pair.dtype.name: pair.dtype for pair in pairs}.values():
        fields = Fields.of(dtype)
        some = [pair for pair in pairs if pair.dtype == dtype]
        size = fields.exponent_mask + 1
        alive, dead = np.zeros(size), np.zeros(size)
        exponents, steps = [], []
        for pair in some:
            at = np.flatnonzero(pair.old != pair.new)
            alive += np.bincount(fields.exponents(pair.old).astype(np.int64), minlength=size)
            exponents.append(fields.exponents(pair.old[at]).astype(np.int64))
            dead += np.bincount(exponents[-1], minlength=size)
            steps.append(fields.ordered(pair.new[at]) - fields.ordered(pair.old[at]))
        exponent, step = np.concatenate(exponents), np.concatenate(steps)
        context += float(np.sum(_mask_bits(alive, dead)))
        context += sum(_symbol_bits(step[exponent == value]) for value in np.unique(exponent))
        free += float(np.sum(_mask_bits(alive.sum(keepdims=True), dead.sum(keepdims=True)))) + _symbol_bits(step)
        cells, changed = cells + int(alive.sum()), changed + len(step)
    return Floors(context / max(changed, 1), free / max(changed, 1), cells, changed)


def _mask_bits(cells: npt.NDArray[np.float64], changed: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    def log_product(count: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        product: npt.NDArray[np.float64] = count * np.log2(np.maximum(count, 1))
        return product

    return log_product(cells) - log_product(changed) - log_product(cells - changed)


def _symbol_bits(symbols: Cells) -> float:
    counts = np.unique(symbols, return_counts=True)[1]
    return float(-np.sum(counts * np.log2(counts / len(symbols))))
