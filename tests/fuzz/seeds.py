"""First inputs of the coverage-guided fuzzer: sound streams of every type, with and without classes and halves.

python tests/fuzz/seeds.py DIRECTORY writes them, and the table that the fuzzer's DCR_SURVIVAL names, into DIRECTORY.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from dcr_s3.delta import reference
from dcr_s3.delta.changes import CELL_TYPES, Cells
from dcr_s3.delta.clock import choose_model
from dcr_s3.delta.fields import Fields
from dcr_s3.delta.model import HazardModel
from dcr_s3.delta.tables import MIN_UNIT_BITS, SURVIVAL
from dcr_s3.format.dtypes import DTYPES

KINDS = ("U8", "F8_E4M3", "F8_E5M2", "I16", "F16", "BF16", "F32", "F64")
"""In the order of the table of types in fuzz_decoders.c."""

_HEADER = struct.Struct("<6B3H16H")


def cells_of(seed: int, count: int, cell_bytes: int) -> Cells:
    """The cells that fuzz_decoders.c makes from ``seed``."""
    numbers = np.arange(1, count * cell_bytes + 1, dtype=np.uint64) * np.uint64((2 * seed + 1) * 2654435761)
    return (numbers >> np.uint64(21)).astype(np.uint8).view(CELL_TYPES[cell_bytes])


def packed_input(kind: int, seed: int, model: HazardModel, old: Cells, new: Cells) -> bytes:
    """What fuzz_decoders.c takes apart again."""
    fields = Fields.of(DTYPES[KINDS[kind]])
    positions = np.flatnonzero(old != new).astype(np.uint32)
    stream = reference.encode_positions([old], positions, fields, model)
    signs, values = reference.encode_values(old[positions], new[positions], fields, model)
    hazards = model.hazards.tolist()
    hazards += [0] * (16 - len(hazards))
    units = model.unit_bits - MIN_UNIT_BITS | 0x80 * model.halved
    first = model.first_exponent
    numbers = (kind, units, first & 255, first >> 8, len(model.codes) > 1, seed)
    return _HEADER.pack(*numbers, len(old), len(positions), len(stream), *hazards) + signs + stream + values


def seeds() -> Iterator[bytes]:
    """All inputs, the same every time."""
    rng = np.random.default_rng(3)
    for kind, cells, context, halved in product(range(len(KINDS)), (70, 900, 9000), (False, True), (False, True)):
        fields = Fields.of(DTYPES[KINDS[kind]])
        seed = int(rng.integers(256))
        old = cells_of(seed, cells, fields.cell_bytes)
        new = old.copy()
        chosen = rng.integers(cells, size=max(cells // 40, 3))
        new[chosen] ^= rng.integers(1, 8, len(chosen)).astype(old.dtype)
        new[chosen[0]] = ~old[chosen[0]]
        tally = reference.tally([old], [new], fields, 0)
        model = choose_model(fields, cells, tally, context=context)
        yield packed_input(kind, seed, replace(model, halved=halved), old, new)


def write_seeds(directory: Path) -> Path:
    """Writes the inputs and returns where the table is."""
    inputs = directory / "inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds()):
        (inputs / f"sound-{number:03}").write_bytes(data)
    table = directory / "survival"
    table.write_bytes(SURVIVAL.tobytes())
    return table


if __name__ == "__main__":
    write_seeds(Path(sys.argv[1]))
