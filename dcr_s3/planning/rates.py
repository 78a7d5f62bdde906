"""How fast one core of this machine works, measured in a few seconds."""

from __future__ import annotations

from time import perf_counter
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from dcr_s3.delta import apply_changes, decode_block, encode_block
from dcr_s3.format.document import Document
from dcr_s3.format.dtypes import DTYPES
from dcr_s3.planning.entropy import position_bits

_CELLS = 8 << 20
_LOW, _HIGH = 0.005, 0.03
_TRIES = 3


class Rates(Document):
    """Rates of one core, and what a change takes on the wire beyond its position.

    Time of a stage: ``dense_bytes / <stage>_bytes_per_s + changed / <stage>_changes_per_s``. The defaults were
    measured on one core of a small cloud machine.
    """

    MAGIC: ClassVar[str] = "dcr_s3/rates"
    magic: Literal["dcr_s3/rates"] = "dcr_s3/rates"

    encode_bytes_per_s: float = Field(10e9, gt=0)
    encode_changes_per_s: float = Field(16e6, gt=0)
    decode_bytes_per_s: float = Field(20e9, gt=0)
    decode_changes_per_s: float = Field(11e6, gt=0)
    apply_changes_per_s: float = Field(200e6, gt=0)
    value_bits: float = Field(1.0, ge=0)
    """Bits per change beyond what the positions would cost if they were random."""


def measure_rates() -> Rates:
    """Encodes, decodes and applies made-up bf16 changes of two densities on the calling thread."""
    low, high = _measure(_LOW), _measure(_HIGH)
    dense_bytes = 2.0 * _CELLS
    more = (_HIGH - _LOW) * _CELLS

    def split(stage: int) -> tuple[float, float]:
        per_change = max((high[stage] - low[stage]) / more, 1e-10)
        dense_s = max(low[stage] - per_change * _LOW * _CELLS, dense_bytes / 100e9)
        return dense_bytes / dense_s, 1 / per_change

    encode, decode, apply = split(0), split(1), split(2)
    return Rates(
        encode_bytes_per_s=encode[0],
        encode_changes_per_s=encode[1],
        decode_bytes_per_s=decode[0],
        decode_changes_per_s=decode[1],
        apply_changes_per_s=apply[1],
        value_bits=max(0.0, high[3] - position_bits(_HIGH)),
    )


def _measure(ratio: float) -> tuple[float, float, float, float]:
    """Best seconds of encoding, decoding and applying, and bits per change."""
    random = np.random.default_rng(1)
    old = (random.standard_normal(_CELLS, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = old.copy()
    changed = random.random(_CELLS) < ratio
    new[changed] += np.where(random.random(int(changed.sum())) < 0.5, 1, -1).astype(np.uint16)
    dtype = DTYPES["BF16"]
    best = [float("inf")] * 3
    bits = 0.0
    for _ in range(_TRIES):
        begun = perf_counter()
        block = encode_block(dtype, [old], [new], context=True)
        encoded = perf_counter()
        changes = decode_block(dtype, block.coding, block.payload, len(block.changes.positions), [old])
        decoded = perf_counter()
        apply_changes([old.copy()], changes.positions, changes.new)
        applied = perf_counter()
        best = [min(a, b) for a, b in zip(best, (encoded - begun, decoded - encoded, applied - decoded), strict=True)]
        bits = 8 * len(block.payload) / len(block.changes.positions)
    return best[0], best[1], best[2], bits
