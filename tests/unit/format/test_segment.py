"""Segments: offsets as FORMAT.md has them, round trip, and hostile objects."""

from __future__ import annotations

import struct
import zlib

import pytest
import zstandard

from dcr_s3.errors import CorruptObject, UnsupportedFormat
from dcr_s3.format.codings import Coding
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.dtypes import DTYPES
from dcr_s3.format.region import Region
from dcr_s3.format.segment import BlockEntry, SegmentHeader, encode_index, finish, parse_segment

HEADER = SegmentHeader("ab" * 16, 3, "000001-0123456789ab-0000", 0, 2)


def make_block(offset: int, size: int, regions: tuple[Region, ...], changed: int = 1) -> BlockEntry:
    cells = sum(r.cells for r in regions)
    digest = StateDigest(2**64 - 1, 7)
    return BlockEntry(
        offset, size, Coding.DENSE_XOR, DTYPES["BF16"], cells, changed, b"d" * 32, digest, StateDigest(), regions
    )


def make_segment() -> tuple[bytes, list[BlockEntry]]:
    head = HEADER.to_bytes()
    strided = Region(1, 3, (2, 4), (10, 1))
    blocks = [make_block(len(head), 5, (Region.run(0, 0, 4), strided)), make_block(len(head) + 5, 2, (strided,))]
    index, trailer = finish(blocks, len(head) + 7)
    return head + b"1234567" + index + trailer, blocks


def test_round_trip() -> None:
    body, blocks = make_segment()
    parsed = parse_segment(memoryview(body), where="x")
    assert parsed.header == HEADER
    assert list(parsed.blocks) == blocks


def test_offsets_are_those_of_the_format() -> None:
    body, blocks = make_segment()
    assert body[:8] == b"\x89DCRS3\r\n"
    assert struct.unpack("<HHI", body[8:16]) == (1, 0, blocks[0].offset - 16)
    offset, size, raw_size, crc, zero, end = struct.unpack("<QIIII8s", body[-32:])
    assert (offset, offset + size, zero, end) == (blocks[0].offset + 7, len(body) - 32, 0, b"DCRS3END")
    assert crc == zlib.crc32(body[-32:-16])
    raw = zstandard.ZstdDecompressor().decompress(body[offset : offset + size])
    assert len(raw) == raw_size
    assert struct.unpack_from("<II", raw) == (2, 96)
    record = struct.unpack_from("<QIIIIHBBI32s4Q", raw, 8)
    assert record == (blocks[0].offset, 5, 12, 1, 2, 0, 1, 10, 0, b"d" * 32, 2**64 - 1, 7, 0, 0)
    assert struct.unpack_from("<IIQQQ", raw, 8 + 2 * 96) == (0, 1, 0, 4, 1)
    assert struct.unpack_from("<IIQQQQQ", raw, 8 + 2 * 96 + 32) == (1, 2, 3, 2, 10, 4, 1)


def test_every_truncation_is_refused() -> None:
    body, _ = make_segment()
    for length in range(len(body)):
        with pytest.raises(CorruptObject):
            parse_segment(memoryview(body[:length]), where="seg")


def test_another_major_version_is_refused() -> None:
    body, _ = make_segment()
    with pytest.raises(UnsupportedFormat, match="seg"):
        parse_segment(memoryview(body[:8] + b"\x02\x00" + body[10:]), where="seg")


def rebuilt(raw: bytes, declared: int | None = None) -> memoryview:
    """The segment with another index."""
    head = HEADER.to_bytes()
    index = zstandard.ZstdCompressor().compress(raw)
    fields = struct.pack("<QII", len(head) + 7, len(index), len(raw) if declared is None else declared)
    trailer = fields + struct.pack("<II8s", zlib.crc32(fields), 0, b"DCRS3END")
    return memoryview(head + b"1234567" + index + trailer)


def patched(at: int, layout: str, *values: int) -> bytes:
    raw = bytearray(encode_index(make_segment()[1]))
    struct.pack_into(layout, raw, at, *values)
    return bytes(raw)


FIRST_REGION = 8 + 2 * 96


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (patched(0, "<I", 2**31), "blocks does not fit"),
        (patched(0, "<I", 1), "seg"),
        (patched(4, "<I", 97), "does not fit"),
        (patched(8, "<Q", 0), "payload at"),
        (patched(16, "<I", 2**31), "payload at"),
        (patched(20, "<I", 2**31), "limits"),
        (patched(20, "<I", 0), "limits"),
        (patched(20, "<I", 11), "add up"),
        (patched(24, "<I", 13), "limits"),
        (patched(28, "<I", 0), "regions for"),
        (patched(28, "<I", 2**31), "regions for"),
        (patched(28, "<I", 12), "do not fit"),
        (patched(32, "<H", 1), "reserved"),
        (patched(34, "<B", 200), "unknown coding"),
        (patched(35, "<B", 200), "unknown dtype"),
        (patched(FIRST_REGION + 4, "<I", 0), "dims"),
        (patched(FIRST_REGION + 4, "<I", 9), "dims"),
        (patched(FIRST_REGION + 8, "<Q", 2**63), "limits"),
        (patched(FIRST_REGION + 16, "<Q", 2**63), "limits"),
        (patched(0, "<I", 2) + b"x", "fill"),
    ],
)
def test_a_hostile_index_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(CorruptObject, match=message):
        parse_segment(rebuilt(raw), where="seg")


def test_an_index_that_expands_beyond_its_declared_size_is_refused() -> None:
    with pytest.raises(CorruptObject, match="index"):
        parse_segment(rebuilt(b"\0" * 1_000_000, declared=100), where="seg")
    with pytest.raises(CorruptObject, match="limit"):
        parse_segment(rebuilt(b"\0" * 100, declared=2**31), where="seg")
