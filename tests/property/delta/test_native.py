"""The C kernels against the NumPy reference: the same bytes, and the same refusals, whatever comes."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcr_s3.delta import clock, codec, kernels, reference
from dcr_s3.delta.changes import CELL_TYPES, Cells, Pieces
from dcr_s3.delta.fields import Fields
from dcr_s3.errors import CorruptObject
from dcr_s3.format.dtypes import DTYPES, Dtype

native = pytest.importorskip("dcr_s3.delta.native", reason="the C extension is not built")
_native = pytest.importorskip("dcr_s3.delta._native", reason="the C extension is not built")

TYPES = [DTYPES[name] for name in ("BOOL", "I8", "F8_E4M3", "F8_E5M2", "F16", "BF16", "I32", "F32", "F64", "I64", "F4")]
SIZES = [0, 1, 2, 63, 64, 65, 200, 4095, 4097, 9000]
few = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def sides(draw: st.DrawFn) -> tuple[Dtype, Cells, Cells]:
    """A type, and cells before and after."""
    dtype = draw(st.sampled_from(TYPES))
    size = draw(st.sampled_from(SIZES))
    generator = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    cell = CELL_TYPES[dtype.cell_bytes]
    old = generator.integers(0, 256, size * dtype.cell_bytes).astype(np.uint8).view(cell)
    if dtype.exponent_bits and draw(st.booleans()):
        middle = (1 << dtype.exponent_bits - 1) - 1
        spread = np.clip(generator.normal(middle - 4, 2.5, size), 0, 2 * middle).astype(np.uint64)
        old = old & cell.type(~(((1 << dtype.exponent_bits) - 1) << dtype.mantissa_bits) & (1 << dtype.bits) - 1)
        old = (old | (spread << np.uint64(dtype.mantissa_bits)).astype(cell)).astype(cell)
    changed = generator.random(size) < draw(st.sampled_from([0.0, 0.0005, 0.007, 0.05, 0.4, 1.0]))
    other = generator.integers(0, 256, size * dtype.cell_bytes).astype(np.uint8).view(cell)
    if draw(st.booleans()):
        fields = Fields.of(dtype)
        steps = generator.integers(-3, 4, size).astype(f"<i{dtype.cell_bytes}").view(cell)
        other = fields.unordered(fields.ordered(old) + steps)
    return dtype, old, np.where(changed, other, old)


def cut(draw: st.DrawFn, cells: Cells) -> Pieces:
    """The cells in pieces of any size, at odd addresses."""
    raw = np.zeros(cells.nbytes + 1, np.uint8)
    raw[1:] = cells.view(np.uint8)
    cuts = draw(st.lists(st.integers(0, len(cells)), max_size=6).map(sorted))
    return np.split(raw[1:].view(cells.dtype), cuts)


@pytest.fixture(params=["plain", "avx2", "avx512"])
def native_level(request: pytest.FixtureRequest) -> Iterator[None]:
    level = ["plain", "avx2", "avx512"].index(request.param)
    if level > _native.best_simd_level():
        pytest.skip(f"this processor has no {request.param}")
    _native.set_simd_level(level)
    yield
    _native.set_simd_level(_native.best_simd_level())


def same(mine: Any, theirs: Any) -> None:
    if isinstance(mine, np.ndarray):
        assert mine.dtype == theirs.dtype
        assert np.array_equal(mine, theirs)
    elif isinstance(mine, tuple):
        for one, other in zip(mine, theirs, strict=True):
            same(one, other)
    else:
        assert mine == theirs


def with_kernels(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "active", lambda: module)


@few
@given(data=st.data(), sides=sides(), context=st.booleans())
def test_blocks_are_the_same_bytes(
    native_level: None, monkeypatch: pytest.MonkeyPatch, data: st.DataObject, sides: Any, context: bool
) -> None:
    dtype, old, new = sides
    before, after = cut(data.draw, old), cut(data.draw, new)
    encoded = []
    for module in (native, reference):
        with_kernels(module, monkeypatch)
        encoded.append(codec.encode_block(dtype, before, after, context=context))
    same(tuple(encoded[0]), tuple(encoded[1]))
    again = cut(data.draw, old)
    for module in (native, reference):
        with_kernels(module, monkeypatch)
        changed = len(encoded[0].changes.positions)
        decoded = codec.decode_block(dtype, encoded[0].coding, encoded[0].payload, changed, again)
        same(tuple(decoded), tuple(encoded[0].changes))
        mirror = [piece.copy() for piece in again]
        module.apply_changes(mirror, decoded.positions, decoded.new)
        assert np.array_equal(np.concatenate(mirror), new)


@few
@given(data=st.data(), sides=sides(), context=st.booleans())
def test_damaged_payloads_are_refused_or_mean_the_same(
    native_level: None, monkeypatch: pytest.MonkeyPatch, data: st.DataObject, sides: Any, context: bool
) -> None:
    dtype, old, new = sides
    encoded = codec.encode_block(dtype, [old], [new], context=context)
    if not encoded.payload:
        return
    payload = bytearray(encoded.payload)
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    end = data.draw(st.one_of(st.just(len(payload)), st.integers(0, len(payload))))
    changed = min(max(len(encoded.changes.positions) + data.draw(st.sampled_from([0, 0, 0, -1, 1])), 0), len(old) + 1)
    outcomes: list[Any] = []
    for module in (native, reference):
        with_kernels(module, monkeypatch)
        try:
            outcomes.append(tuple(codec.decode_block(dtype, encoded.coding, payload[:end], changed, [old])))
        except CorruptObject:
            outcomes.append("corrupt")
    same(*outcomes)


@few
@given(data=st.data(), sides=sides(), stride_log2=st.integers(0, 7), start=st.integers(0, 1 << 35))
def test_tallies_and_digests_are_the_same(
    native_level: None, data: st.DataObject, sides: Any, stride_log2: int, start: int
) -> None:
    dtype, old, new = sides
    fields = Fields.of(dtype)
    before, after = cut(data.draw, old), cut(data.draw, new)
    assert native.tally(before, after, fields, stride_log2) == reference.tally(before, after, fields, stride_log2)
    assert native.count_exponents(old, fields) == reference.count_exponents(old, fields)
    key = tuple(data.draw(st.lists(st.integers(0, (1 << 32) - 1), min_size=4, max_size=4)))
    assert native.digest_range(key, start, old) == reference.digest_range(key, start, old)
    indices = (np.arange(len(old), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(28)
    assert native.digest_at(key, indices, old) == reference.digest_at(key, indices, old)


@few
@given(data=st.data(), sides=sides(), halved=st.booleans())
def test_any_model_codes_positions_the_same(native_level: None, data: st.DataObject, sides: Any, halved: bool) -> None:
    """Models that the encoder would not choose: rare units, classes anywhere, hazards of any size."""
    dtype, old, new = sides
    fields = Fields.of(dtype)
    if len(old) < 2:
        return
    classes = 16 if fields.exponent_mask and data.draw(st.booleans()) else 1
    codes = bytes(data.draw(st.lists(st.integers(1, 255), min_size=classes, max_size=classes)))
    first = data.draw(st.integers(0, fields.exponent_mask)) if classes > 1 else 0
    model = clock.HazardModel(data.draw(st.integers(14, 24)), first, codes, halved)
    positions = np.flatnonzero(old != new).astype(np.uint32)
    pieces = cut(data.draw, old)
    stream = native.encode_positions(pieces, positions, fields, model)
    assert stream == reference.encode_positions(pieces, positions, fields, model)
    for module in (native, reference):
        found, cells = module.decode_positions(stream, len(positions), pieces, fields, model)
        assert np.array_equal(found, positions)
        assert np.array_equal(cells, old[positions])
