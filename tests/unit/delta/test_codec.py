"""Blocks through the codec with the kernels that this process uses."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dcr_s3.delta import Pieces, apply_changes, decode_block, encode_block
from dcr_s3.delta.changes import CELL_TYPES, Cells
from dcr_s3.delta.fields import Fields
from dcr_s3.errors import BadInput, CorruptObject
from dcr_s3.format.codings import Coding
from dcr_s3.format.dtypes import DTYPES, Dtype

BF16 = DTYPES["BF16"]


def random_cells(dtype: Dtype, count: int, seed: int = 0) -> Cells:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, count * dtype.cell_bytes).astype(np.uint8).view(CELL_TYPES[dtype.cell_bytes])


def stepped(dtype: Dtype, cells: Cells, share: float, seed: int = 1) -> Cells:
    """``cells`` with about ``share`` of them moved by one or two units in the last place."""
    generator = np.random.default_rng(seed)
    fields = Fields.of(dtype)
    steps = generator.integers(-2, 3, len(cells)) * (generator.random(len(cells)) < share)
    return fields.unordered(fields.ordered(cells) + steps.astype(f"<i{dtype.cell_bytes}").view(cells.dtype))


def weights_and_update(count: int, learning_rate: float) -> tuple[Cells, Cells]:
    """bfloat16 casts of normal weights before and after steps of about ``learning_rate``, as Adam makes them."""
    generator = np.random.default_rng(7)
    master = generator.standard_normal(count).astype(np.float32) * np.float32(0.05)
    moved = master + np.float32(learning_rate) * generator.standard_normal(count).astype(np.float32)
    rounded = [(values.view(np.uint32) + 0x8000 >> 16).astype(np.uint16) for values in (master, moved)]
    return rounded[0], rounded[1]


def check_round_trip(dtype: Dtype, old: Pieces, new: Pieces, *, context: bool) -> Coding:
    encoded = encode_block(dtype, old, new, context=context)
    before, after = np.concatenate(old), np.concatenate(new)
    expected = np.flatnonzero(before != after)
    assert np.array_equal(encoded.changes.positions, expected)
    assert np.array_equal(encoded.changes.old, before[expected])
    assert np.array_equal(encoded.changes.new, after[expected])
    decoded = decode_block(dtype, encoded.coding, encoded.payload, len(expected), old)
    for mine, theirs in zip(decoded, encoded.changes, strict=True):
        assert mine.dtype == theirs.dtype
        assert np.array_equal(mine, theirs)
    mirror = [piece.copy() for piece in old]
    apply_changes(mirror, decoded.positions, decoded.new)
    assert np.array_equal(np.concatenate(mirror), after)
    return encoded.coding


@pytest.mark.parametrize("context", [True, False])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
def test_every_type_survives_at_every_density(dtype: Dtype, context: bool) -> None:
    old = random_cells(dtype, 3000)
    for share in (0.0, 0.002, 0.1, 1.0):
        new = stepped(dtype, old, share)
        check_round_trip(dtype, np.split(old, [0, 77, 1000]), np.split(new, [2500]), context=context)
    check_round_trip(dtype, [old], [random_cells(dtype, 3000, seed=5)], context=context)


@pytest.mark.parametrize("name", ["F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64"])
def test_every_special_value_can_become_every_other(name: str) -> None:
    dtype = DTYPES[name]
    top, inf = 1 << dtype.bits - 1, ((1 << dtype.exponent_bits) - 1) << dtype.mantissa_bits
    quiet = 1 << dtype.mantissa_bits - 1
    magnitudes = [0, 1, quiet, (1 << dtype.mantissa_bits) - 1, 1 << dtype.mantissa_bits, inf - 1, inf, inf + 1]
    magnitudes += [inf | quiet, inf | quiet | 1, top - 1]
    values = magnitudes + [top | magnitude for magnitude in magnitudes]
    pairs = np.array(list(itertools.product(values, values)), CELL_TYPES[dtype.cell_bytes])
    quiet_cells = np.zeros(20 * len(pairs), pairs.dtype)
    old, new = np.concatenate((pairs[:, 0], quiet_cells)), np.concatenate((pairs[:, 1], quiet_cells))
    assert check_round_trip(dtype, [old], [new], context=True) is Coding.CLOCK_CONTEXT


def test_an_unchanged_block_is_empty() -> None:
    cells = random_cells(BF16, 5000)
    encoded = encode_block(BF16, [cells], [cells.copy()], context=True)
    assert (encoded.coding, encoded.payload, len(encoded.changes.positions)) == (Coding.NONE, b"", 0)
    assert len(decode_block(BF16, Coding.NONE, b"", 0, [cells]).positions) == 0


def test_context_takes_the_context_and_its_absence_does_without() -> None:
    old, new = weights_and_update(1 << 18, 5e-6)
    with_context = encode_block(BF16, [old], [new], context=True)
    without = encode_block(BF16, [old], [new], context=False)
    assert with_context.coding is Coding.CLOCK_CONTEXT
    assert without.coding is Coding.CLOCK_FREE
    assert len(with_context.payload) < 0.8 * len(without.payload)


def test_positions_without_context_do_not_depend_on_the_old_cells() -> None:
    old, new = weights_and_update(1 << 16, 5e-6)
    encoded = encode_block(BF16, [old], [new], context=False)
    changed = len(encoded.changes.positions)
    elsewhere = decode_block(BF16, encoded.coding, encoded.payload, changed, [np.full_like(old, 0x3F80)])
    assert np.array_equal(elsewhere.positions, encoded.changes.positions)


def test_a_rewritten_block_is_dense_by_the_smaller_of_both_ways() -> None:
    noise = random_cells(DTYPES["F32"], 50000)
    constant = encode_block(DTYPES["F32"], [noise], [np.full_like(noise, 0x3F800000)], context=True)
    assert constant.coding is Coding.DENSE_PLAIN
    flipped = encode_block(DTYPES["F32"], [noise], [noise ^ np.uint32(0x00800000)], context=True)
    assert flipped.coding is Coding.DENSE_XOR
    for encoded in (constant, flipped):
        assert len(encoded.payload) < 500
        decoded = decode_block(DTYPES["F32"], encoded.coding, encoded.payload, len(noise), [noise])
        assert np.array_equal(decoded.new, encoded.changes.new)


def plug_in_bits(old: Cells, new: Cells, groups: np.ndarray) -> float:
    """Entropy of which cells change and of their steps, given ``groups``, in bits for the whole block."""
    bits = 0.0
    for group in np.unique(groups):
        members = groups == group
        changed = members & (old != new)
        steps = Fields.of(BF16).ordered(new[changed]) - Fields.of(BF16).ordered(old[changed])
        counts = np.array([members.sum() - changed.sum(), changed.sum()])
        for symbols in (counts, np.unique(steps, return_counts=True)[1]):
            bits -= float(np.sum(symbols * np.log2(np.maximum(symbols, 1) / max(symbols.sum(), 1))))
    return bits


@pytest.mark.parametrize("learning_rate", [1e-6, 5e-6, 2e-5])
def test_size_comes_close_to_the_entropy(learning_rate: float) -> None:
    old, new = weights_and_update(1 << 21, learning_rate)
    context_floor = plug_in_bits(old, new, Fields.of(BF16).exponents(old))
    free_floor = plug_in_bits(old, new, np.zeros(len(old)))
    assert 8 * len(encode_block(BF16, [old], [new], context=True).payload) < 1.03 * context_floor
    assert 8 * len(encode_block(BF16, [old], [new], context=False).payload) < 1.05 * free_floor


def test_size_on_uniform_changes_comes_close_to_the_entropy() -> None:
    old, _ = weights_and_update(1 << 20, 0)
    new = stepped(BF16, old, 0.05)
    floor = plug_in_bits(old, new, Fields.of(BF16).exponents(old))
    assert 8 * len(encode_block(BF16, [old], [new], context=True).payload) < 1.02 * floor


def test_thousands_of_tiny_pieces_are_one_block() -> None:
    old, new = weights_and_update(40000, 1e-5)
    sizes = np.random.default_rng(3).integers(0, 20, 4000)
    cuts = np.minimum(np.cumsum(sizes), len(old))
    whole = encode_block(BF16, [old], [new], context=True)
    apart = encode_block(BF16, np.split(old, cuts), np.split(new, cuts[::3]), context=True)
    assert apart.payload == whole.payload
    decoded = decode_block(BF16, apart.coding, apart.payload, len(apart.changes.positions), np.split(old, cuts))
    assert np.array_equal(decoded.new, whole.changes.new)


def test_unaligned_and_read_only_cells_are_welcome_and_left_alone() -> None:
    old, new = weights_and_update(30000, 1e-5)
    sides = []
    for cells in (old, new):
        raw = np.zeros(cells.nbytes + 1, np.uint8)
        raw[1:] = cells.view(np.uint8)
        raw.flags.writeable = False
        sides.append(raw[1:].view(np.uint16))
    encoded = encode_block(BF16, [sides[0]], [sides[1]], context=True)
    assert encoded.payload == encode_block(BF16, [old], [new], context=True).payload
    decoded = decode_block(BF16, encoded.coding, encoded.payload, len(encoded.changes.positions), [sides[0]])
    assert np.array_equal(decoded.new, encoded.changes.new)
    assert np.array_equal(sides[0], old)


def test_threads_do_not_disturb_each_other() -> None:
    jobs = [weights_and_update(50000, rate) for rate in (1e-6, 3e-6, 1e-5, 3e-5)] * 4
    alone = [encode_block(BF16, [old], [new], context=True).payload for old, new in jobs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda job: encode_block(BF16, [job[0]], [job[1]], context=True).payload, jobs))
    assert together == alone


def test_sides_of_different_size_or_type_are_refused() -> None:
    cells = random_cells(BF16, 10)
    with pytest.raises(BadInput, match="10 cells is compared with 9"):
        encode_block(BF16, [cells], [cells[:9]], context=True)
    with pytest.raises(BadInput, match="uint32"):
        encode_block(BF16, [cells], [cells.astype(np.uint32)], context=True)
    with pytest.raises(BadInput, match="BF16"):
        decode_block(BF16, Coding.NONE, b"", 0, [cells.reshape(2, 5)])
    with pytest.raises(BadInput, match="contiguous"):
        encode_block(BF16, [cells[::2]], [cells[::2]], context=True)


def test_a_declaration_that_cannot_be_is_refused() -> None:
    cells = random_cells(BF16, 10)
    for coding, payload, changed in [
        (Coding.NONE, b"", 1),
        (Coding.NONE, b"x", 0),
        (Coding.CLOCK_FREE, b"", 0),
        (Coding.CLOCK_FREE, b"", 11),
        (Coding.CLOCK_CONTEXT, b"\x10" * 20, 3),
        (Coding.DENSE_XOR, b"no frame", 3),
        (Coding.CLOCK_FREE, b"\x03" + bytes(40), 3),
    ]:
        with pytest.raises(CorruptObject):
            decode_block(BF16, coding, payload, changed, [cells])


@pytest.mark.parametrize("context", [True, False])
def test_a_stream_with_bytes_missing_or_left_over_is_refused(context: bool) -> None:
    old, new = weights_and_update(20000, 1e-5)
    encoded = encode_block(BF16, [old], [new], context=context)
    changed = len(encoded.changes.positions)
    for payload in (encoded.payload + b"\0", encoded.payload[:-1], encoded.payload[:30]):
        with pytest.raises(CorruptObject):
            decode_block(BF16, encoded.coding, payload, changed, [old])
    with pytest.raises(CorruptObject):
        decode_block(BF16, encoded.coding, encoded.payload, changed - 8, [old])


def test_a_dense_block_with_another_number_of_changes_or_bytes_is_refused() -> None:
    old, new = random_cells(BF16, 3000), random_cells(BF16, 3000, seed=9)
    encoded = encode_block(BF16, [old], [new], context=True)
    changed = len(encoded.changes.positions)
    with pytest.raises(CorruptObject, match="changes"):
        decode_block(BF16, encoded.coding, encoded.payload, changed - 1, [old])
    with pytest.raises(CorruptObject, match="declares"):
        decode_block(BF16, encoded.coding, encoded.payload, changed, [np.append(old, old[:1])])


def test_applying_outside_the_block_writes_nothing() -> None:
    cells = random_cells(BF16, 100)
    original = cells.copy()
    for positions in ([3, 100], [5, 4], [7, 7]):
        with pytest.raises(ValueError, match="ascending cells"):
            apply_changes([cells[:50], cells[50:]], np.array(positions, np.uint32), np.array([1, 2], np.uint16))
    assert np.array_equal(cells, original)
