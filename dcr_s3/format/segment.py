"""Segments: `.dcr` objects.

A header, block payloads, one compressed index, a trailer. Offsets are in `schemas/FORMAT.md`.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import zstandard

from dcr_s3.errors import CorruptObject
from dcr_s3.format import limits
from dcr_s3.format.codings import Coding
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.document import FORMAT_MAJOR, FORMAT_MINOR, WRITER, check_header
from dcr_s3.format.dtypes import DTYPES_BY_CODE, Dtype
from dcr_s3.format.region import Region, pack_regions, unpack_regions

MAGIC = b"\x89DCRS3\r\n"
END_MAGIC = b"DCRS3END"
HEADER_MAGIC = "dcr_s3/segment"
BLOCK_DIGEST_BYTES = 32

_PREFIX = struct.Struct("<8sHHI")
_TRAILER = struct.Struct("<QIII4x8s")
_INDEX_HEAD = struct.Struct("<II")
_BLOCK = struct.Struct("<QIIIIHBB4x32s16s16s")

PREFIX_BYTES = _PREFIX.size
TRAILER_BYTES = _TRAILER.size


@dataclass(frozen=True)
class SegmentHeader:
    """Which run, version and place this segment belongs to."""

    run_id: str
    version: int
    attempt: str
    owner: int
    seq: int

    def to_bytes(self) -> bytes:
        """Magic, format version, length, JSON."""
        body = json.dumps(
            {
                "magic": HEADER_MAGIC,
                "format": {"major": FORMAT_MAJOR, "minor": FORMAT_MINOR},
                "writer": WRITER,
                "run_id": self.run_id,
                "version": self.version,
                "attempt": self.attempt,
                "owner": self.owner,
                "seq": self.seq,
            },
            sort_keys=True,
            separators=(",", ":"),
        ).encode()
        return _PREFIX.pack(MAGIC, FORMAT_MAJOR, FORMAT_MINOR, len(body)) + body


@dataclass(frozen=True)
class BlockEntry:
    """One block of an index. ``offset`` and ``size_bytes`` place its payload in the segment."""

    offset: int
    size_bytes: int
    coding: Coding
    dtype: Dtype
    cells: int
    changed: int
    sha256: bytes
    old: StateDigest
    new: StateDigest
    regions: tuple[Region, ...]

    @property
    def dense_bytes(self) -> int:
        return self.cells * self.dtype.cell_bytes


@dataclass(frozen=True)
class Segment:
    """A parsed segment: what its header and index say."""

    header: SegmentHeader
    blocks: tuple[BlockEntry, ...]


def _pack_digest(digest: StateDigest) -> bytes:
    return struct.pack("<QQ", digest.low, digest.high)


def encode_index(blocks: Sequence[BlockEntry]) -> bytes:
    """The index before compression: block records, then every block's regions in the same order."""
    records = [_INDEX_HEAD.pack(len(blocks), _BLOCK.size)]
    for b in blocks:
        records.append(
            _BLOCK.pack(
                b.offset, b.size_bytes, b.cells, b.changed, len(b.regions), 0, b.coding, b.dtype.code,
                b.sha256, _pack_digest(b.old), _pack_digest(b.new),
            )
        )  # fmt: skip
    return b"".join([*records, *(pack_regions(b.regions) for b in blocks)])


def finish(blocks: Sequence[BlockEntry], index_offset: int) -> tuple[bytes, bytes]:
    """Compressed index and trailer for a segment whose payloads end at ``index_offset``."""
    raw = encode_index(blocks)
    index = zstandard.ZstdCompressor(level=3, write_content_size=True).compress(raw)
    head = struct.pack("<QII", index_offset, len(index), len(raw))
    return index, _TRAILER.pack(index_offset, len(index), len(raw), zlib.crc32(head), END_MAGIC)


def parse_segment(body: memoryview, *, where: str) -> Segment:
    """Reads header, trailer and index of a whole segment. Payloads are not looked at.

    Raises ``CorruptObject`` for anything malformed, ``UnsupportedFormat`` for another major version.
    """
    header, header_end = _parse_header(body, where)
    if len(body) < header_end + TRAILER_BYTES:
        raise CorruptObject(f"{where}: truncated, {len(body)} bytes")
    offset, size, raw_size, crc, end = _TRAILER.unpack(body[-TRAILER_BYTES:])
    if end != END_MAGIC or zlib.crc32(body[-TRAILER_BYTES : -TRAILER_BYTES + 16]) != crc:
        raise CorruptObject(f"{where}: no valid trailer; the object is truncated or damaged")
    if offset < header_end or offset + size != len(body) - TRAILER_BYTES:
        raise CorruptObject(f"{where}: the index does not lie between payloads and trailer")
    blocks = parse_index(bytes(body[offset : offset + size]), raw_size, header_end, offset, where=where)
    return Segment(header, blocks)


def parse_tail(tail: bytes, size_bytes: int, *, where: str) -> tuple[BlockEntry, ...]:
    """The blocks of a segment of ``size_bytes``, from its last bytes: index and trailer, nothing else.

    For readers that have the index's digest and want some payloads only. Raises ``CorruptObject``.
    """
    offset, size, raw_size, crc, end = _TRAILER.unpack(tail[-TRAILER_BYTES:])
    if end != END_MAGIC or zlib.crc32(tail[-TRAILER_BYTES : -TRAILER_BYTES + 16]) != crc:
        raise CorruptObject(f"{where}: no valid trailer; the object is truncated or damaged")
    if offset + size != size_bytes - TRAILER_BYTES or size != len(tail) - TRAILER_BYTES:
        raise CorruptObject(f"{where}: the index does not lie between payloads and trailer")
    return parse_index(tail[:-TRAILER_BYTES], raw_size, None, offset, where=where)


def _parse_header(body: memoryview, where: str) -> tuple[SegmentHeader, int]:
    if len(body) < PREFIX_BYTES:
        raise CorruptObject(f"{where}: truncated, {len(body)} bytes")
    magic, major, _minor, size = _PREFIX.unpack(body[:PREFIX_BYTES])
    if magic != MAGIC:
        raise CorruptObject(f"{where}: is no segment (wrong magic)")
    raw: object = {"magic": HEADER_MAGIC, "format": {"major": major}}
    check_header(raw, HEADER_MAGIC, where)
    if size > limits.SEGMENT_HEADER_BYTES or PREFIX_BYTES + size > len(body):
        raise CorruptObject(f"{where}: header of {size} bytes does not fit")
    try:
        raw = json.loads(bytes(body[PREFIX_BYTES : PREFIX_BYTES + size]))
    except (ValueError, RecursionError):
        raise CorruptObject(f"{where}: header is not valid JSON") from None
    check_header(raw, HEADER_MAGIC, where)
    assert isinstance(raw, dict)
    texts = [raw.get(k) for k in ("run_id", "attempt")]
    numbers = [raw.get(k) for k in ("version", "owner", "seq")]
    if not all(isinstance(t, str) for t in texts) or not all(type(n) is int and n >= 0 for n in numbers):
        raise CorruptObject(f"{where}: header lacks run_id, version, attempt, owner or seq")
    header = SegmentHeader(raw["run_id"], raw["version"], raw["attempt"], raw["owner"], raw["seq"])
    return header, PREFIX_BYTES + size


def parse_index(
    index: bytes, raw_size: int, payload_start: int | None, payload_end: int, *, where: str
) -> tuple[BlockEntry, ...]:
    """Reads a compressed index.

    Payloads must follow each other from ``payload_start`` to ``payload_end`` without a gap.
    """
    if raw_size > limits.INDEX_BYTES:
        raise CorruptObject(f"{where}: index of {raw_size} bytes is over the limit")
    try:
        raw = zstandard.ZstdDecompressor().decompress(index, max_output_size=raw_size)
    except zstandard.ZstdError as error:
        raise CorruptObject(f"{where}: index does not decompress ({error})") from None
    if len(raw) != raw_size or len(raw) < _INDEX_HEAD.size:
        raise CorruptObject(f"{where}: index has {len(raw)} bytes instead of {raw_size}")
    count, record = _INDEX_HEAD.unpack_from(raw)
    if record != _BLOCK.size or count > limits.BLOCKS_PER_SEGMENT or _INDEX_HEAD.size + count * record > len(raw):
        raise CorruptObject(f"{where}: index of {count} blocks does not fit")
    blocks: list[BlockEntry] = []
    at = _INDEX_HEAD.size + count * record
    expected = payload_start
    for number in range(count):
        try:
            block, at = _parse_block(raw, _INDEX_HEAD.size + number * record, at)
        except (ValueError, struct.error) as error:
            raise CorruptObject(f"{where}: block {number}: {error}") from None
        if expected is None:
            expected = block.offset
        if block.offset != expected:
            raise CorruptObject(f"{where}: block {number}: payload at {block.offset}, not at {expected}")
        expected += block.size_bytes
        blocks.append(block)
    if expected != payload_end or at != len(raw):
        raise CorruptObject(f"{where}: index and payloads do not fill the segment")
    return tuple(blocks)


def _parse_block(raw: bytes, at: int, regions_at: int) -> tuple[BlockEntry, int]:
    offset, size, cells, changed, region_count, reserved, coding, dtype, sha256, old, new = _BLOCK.unpack_from(raw, at)
    if dtype not in DTYPES_BY_CODE:
        raise ValueError(f"unknown dtype code {dtype}")
    if coding not in Coding.__members__.values():
        raise ValueError(f"unknown coding {coding}")
    if reserved:
        raise ValueError("reserved field is not zero")
    kind = DTYPES_BY_CODE[dtype]
    if not 0 < cells * kind.cell_bytes <= limits.BLOCK_DENSE_BYTES or changed > cells:
        raise ValueError(f"{changed} changed of {cells} cells is over the limits")
    if not 0 < region_count <= cells:
        raise ValueError(f"{region_count} regions for {cells} cells")
    regions, regions_at = unpack_regions(raw, regions_at, region_count)
    if sum(r.cells for r in regions) != cells:
        raise ValueError("regions do not add up to the block's cells")
    block = BlockEntry(
        offset, size, Coding(coding), kind, cells, changed, sha256,
        StateDigest(*struct.unpack("<QQ", old)), StateDigest(*struct.unpack("<QQ", new)), regions,
    )  # fmt: skip
    return block, regions_at
