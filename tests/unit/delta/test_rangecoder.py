"""The range coder on its own."""

from __future__ import annotations

import random

import pytest

from dcr_s3.delta.rangecoder import RangeDecoder, RangeEncoder
from dcr_s3.errors import CorruptObject


def test_symbols_of_any_size_come_back() -> None:
    draw = random.Random(1)
    symbols = []
    coder = RangeEncoder()
    for _ in range(3000):
        bits = draw.randrange(1, 37)
        start = draw.randrange(1 << bits)
        size = draw.randrange(1, min((1 << bits) - start, max(1 << bits - 1, 1)) + 1)
        symbols.append((start, size, bits))
        coder.encode(start, size, bits)
        coder.encode_flag(bool(size & 1), 1 + draw.randrange(65535))
    draw = random.Random(1)
    decoder = RangeDecoder(coder.finish())
    for start, size, bits in symbols:
        draw.randrange(1, 37), draw.randrange(1 << bits)
        draw.randrange(1, min((1 << bits) - start, max(1 << bits - 1, 1)) + 1)
        assert start <= decoder.point(bits) < start + size
        decoder.consume(start, size, bits)
        assert decoder.flag(1 + draw.randrange(65535)) == bool(size & 1)
    decoder.finish()


def test_carries_run_through_bytes_of_ones() -> None:
    """Always the last, tiny part of the range: low creeps up to a row of 0xFF, and then over it."""
    coder = RangeEncoder()
    for _ in range(40):
        coder.encode((1 << 8) - 1, 1, 8)
    coder.encode(255, 1, 8)
    for _ in range(20):
        coder.encode_flag(True, 65535)
    stream = coder.finish()
    decoder = RangeDecoder(stream)
    for _ in range(41):
        assert decoder.point(8) == 255
        decoder.consume(255, 1, 8)
    assert all(decoder.flag(65535) for _ in range(20))
    decoder.finish()


def test_a_stream_ends_where_it_ends() -> None:
    coder = RangeEncoder()
    for number in range(100):
        coder.encode(number, 1, 7)
    stream = coder.finish()
    for other in (stream + b"\0", stream[:-1]):
        decoder = RangeDecoder(other)
        for number in range(99):
            decoder.consume(number, 1, 7)
        decoder.consume(99, 1, 7)
        with pytest.raises(CorruptObject):
            decoder.finish()


def test_pointing_outside_the_range_is_corrupt() -> None:
    decoder = RangeDecoder(b"\xff" * 20)
    decoder.consume(5, 3, 7)
    with pytest.raises(CorruptObject):
        decoder.point(36)
