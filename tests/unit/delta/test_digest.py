"""The state digest: what it must tell apart, how it adds up, and that it never changes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dcr_s3.delta import digest_at, digest_range, tensor_key
from dcr_s3.delta.changes import CELL_TYPES
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.dtypes import DTYPES

BF16 = DTYPES["BF16"]
KEY = tensor_key("model.embed_tokens.weight", BF16, (64, 32))


def cells_of(size: int, count: int = 2048, seed: int = 0) -> np.ndarray:
    raw = np.random.default_rng(seed).integers(0, 256, count * size).astype(np.uint8)
    return raw.view(CELL_TYPES[size])


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, "b600a44179a420e4cdeb220741930262"),
        (2, "049797fba1e41814f9bdf7f3e26d62e8"),
        (4, "2db22f90cb0f3929db60ca3591d8c0e5"),
        (8, "6c81539ea64696a0ce3fe8e0763556ff"),
    ],
)
def test_known_answers(size: int, expected: str) -> None:
    cells = np.arange(1000, dtype=np.uint64).astype(CELL_TYPES[size]) * CELL_TYPES[size].type(0x9D)
    assert digest_range(KEY, (1 << 32) - 500, cells).hex() == expected


def test_the_key_depends_on_name_type_and_shape() -> None:
    identities = [("a", BF16, (2, 3)), ("b", BF16, (2, 3)), ("a", DTYPES["F16"], (2, 3)), ("a", BF16, (3, 2))]
    assert len({tensor_key(*identity) for identity in [*identities, ("a", BF16, (6,)), ("a", BF16, ())]}) == 6


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_single_bit_counts(size: int) -> None:
    cells = cells_of(size, 64)
    seen = {digest_range(KEY, 0, cells)}
    for cell, bit in itertools.product(range(64), range(8 * size)):
        altered = cells.copy()
        altered[cell] ^= CELL_TYPES[size].type(1 << bit)
        seen.add(digest_range(KEY, 0, altered))
    assert len(seen) == 1 + 64 * 8 * size


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_flipped_bit_flips_about_half_of_each_sum(size: int) -> None:
    cells = cells_of(size, 64)
    indices = np.arange(64, dtype=np.uint64)
    terms = [digest_at(KEY, indices[n : n + 1], cells[n : n + 1]) for n in range(64)]
    for bit in range(8 * size):
        flipped = cells ^ CELL_TYPES[size].type(1 << bit)
        others = [digest_at(KEY, indices[n : n + 1], flipped[n : n + 1]) for n in range(64)]
        for half in ("low", "high"):
            pairs = zip(terms, others, strict=True)
            changed = [(getattr(one, half) ^ getattr(two, half)).bit_count() for one, two in pairs]
            assert 24 < sum(changed) / len(changed) < 40


def test_order_place_and_absence_count() -> None:
    cells = cells_of(2)
    digest = digest_range(KEY, 0, cells)
    swapped = cells.copy()
    swapped[[3, 900]] = swapped[[900, 3]]
    others = [swapped, np.roll(cells, 1), cells[:-1], np.append(cells, cells[:1] * 0), cells * 0]
    digests = {digest_range(KEY, 0, other) for other in others}
    digests |= {digest_range(KEY, 1, cells), digest_range(tensor_key("other", BF16, (64, 32)), 0, cells), StateDigest()}
    assert len(digests | {digest}) == len(others) + 4


def test_opposite_small_steps_do_not_cancel() -> None:
    cells = np.full(512, 0x3F80, np.uint16)
    digest = digest_range(KEY, 0, cells)
    seen = set()
    for one, two in itertools.combinations(range(0, 512, 16), 2):
        altered = cells.copy()
        altered[one] += 1
        altered[two] -= 1
        seen.add(digest_range(KEY, 0, altered))
    assert digest not in seen
    assert len(seen) == 32 * 31 // 2


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("start", [0, 12345, (1 << 32) - 700, (1 << 31) - 700, 1 << 40])
def test_pieces_add_up_and_changes_update(size: int, start: int) -> None:
    cells = cells_of(size)
    whole = digest_range(KEY, start, cells)
    cuts = [0, 1, 700, 701, 1999, 2048]
    parts = [digest_range(KEY, start + a, cells[a:b]) for a, b in itertools.pairwise(cuts)]
    assert sum(parts, StateDigest()) == whole
    indices = np.arange(start, start + len(cells), dtype=np.uint64)
    order = np.random.default_rng(1).permutation(len(cells))
    assert digest_at(KEY, indices[order], cells[order]) == whole
    new = cells.copy()
    at = np.arange(0, 2048, 37)
    new[at] = cells_of(size, seed=4)[at]
    update = digest_at(KEY, indices[at], new[at]) - digest_at(KEY, indices[at], cells[at])
    assert whole + update == digest_range(KEY, start, new)


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2 indices for 3 cells"):
        digest_at(KEY, np.arange(2, dtype=np.uint64), np.zeros(3, np.uint16))
