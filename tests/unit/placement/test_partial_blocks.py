"""Blocks of which a reader knows only some old cells."""

from __future__ import annotations

import numpy as np
import pytest

from dcr_s3.delta import decode_block, encode_block
from dcr_s3.format.codings import Coding
from dcr_s3.format.dtypes import DTYPES


@pytest.mark.parametrize("name", ["BF16", "F32", "U8", "I64", "F8_E4M3"])
@pytest.mark.parametrize("share", [0.001, 0.02, 0.6])
@pytest.mark.parametrize("step", ["small", "any"])
def test_every_change_of_a_known_cell_is_found(name: str, share: float, step: str) -> None:
    dtype = DTYPES[name]
    rng = np.random.default_rng(7)
    kind = np.dtype(f"<u{dtype.cell_bytes}")
    old = (
        rng.integers(0, 1 << 8 * dtype.cell_bytes, 20_000, dtype=np.uint64, endpoint=False)
        if kind.itemsize < 8
        else rng.integers(0, 1 << 63, 20_000, dtype=np.uint64)
    )
    old = old.astype(kind)
    mask = rng.random(old.size) < share
    flips = (
        np.uint64(1)
        if step == "small"
        else rng.integers(1, 1 << 8 * min(dtype.cell_bytes, 7), old.size, dtype=np.uint64)
    ) * np.ones(old.size, np.uint64)
    new = np.where(mask, old ^ flips.astype(kind), old)
    coded = encode_block(dtype, [old], [new], context=False)
    assert coded.coding is not Coding.CLOCK_CONTEXT
    known = rng.random(old.size) < 0.5
    for unknown in (0, (1 << 8 * dtype.cell_bytes) - 1, 0x55):
        half = np.where(known, old, kind.type(unknown))
        changes = decode_block(dtype, coded.coding, coded.payload, len(coded.changes.positions), [half], partial=True)
        rebuilt = half.copy()
        rebuilt[changes.positions] = changes.new
        assert np.array_equal(rebuilt[known], new[known])
    whole = decode_block(dtype, coded.coding, coded.payload, len(coded.changes.positions), [old], partial=True)
    assert np.array_equal(whole.positions, coded.changes.positions)
    assert np.array_equal(whole.new, coded.changes.new)


def test_a_coding_with_context_cannot_be_read_so() -> None:
    cells = np.zeros(8, np.uint16)
    with pytest.raises(ValueError, match="needs all old cells"):
        decode_block(DTYPES["BF16"], Coding.CLOCK_CONTEXT, b"x", 1, [cells], partial=True)
