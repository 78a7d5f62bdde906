"""Other published schemes for weight deltas, written anew to be measured beside ours. All work tensor by tensor.

A scheme encodes two tensors' cells into byte strings and decodes those, given the old cells, into the new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from dcr_s3.delta.changes import CELL_TYPES, Cells
from dcr_s3.delta.fields import Fields

Parts = list[bytes]


class Peer(NamedTuple):
    """One scheme."""

    encode: Callable[[Fields, Cells, Cells], Parts]
    decode: Callable[[Fields, Cells, Parts], Cells]


_TORCH_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_compressor = zstandard.ZstdCompressor(level=1)
_decompressor = zstandard.ZstdDecompressor()


def _tensor(cells: Cells) -> torch.Tensor:
    signed = np.uint8 if cells.itemsize == 1 else np.dtype(f"<i{cells.itemsize}")
    return torch.from_numpy(cells.view(signed))


def _encode_index(fields: Fields, old: Cells, new: Cells) -> Parts:
    index = (_tensor(old) != _tensor(new)).nonzero().squeeze(1)
    return [index.to(torch.int32).numpy().tobytes(), _tensor(new)[index].numpy().tobytes()]


def _decode_index(fields: Fields, old: Cells, parts: Parts) -> Cells:
    new = old.copy()
    new[np.frombuffer(parts[0], np.int32)] = np.frombuffer(parts[1], old.dtype)
    return new


def _encode_xor(fields: Fields, old: Cells, new: Cells) -> Parts:
    return [_compressor.compress(np.bitwise_xor(old, new).tobytes())]


def _decode_xor(fields: Fields, old: Cells, parts: Parts) -> Cells:
    return np.bitwise_xor(old, np.frombuffer(_decompressor.decompress(parts[0]), old.dtype))


def _encode_gaps(fields: Fields, old: Cells, new: Cells) -> Parts:
    """16-bit gaps; a longer one is bridged by cells that do not change."""
    before, after = _tensor(old), _tensor(new)
    index = (before != after).nonzero().squeeze(1)
    gaps = torch.diff(index, prepend=torch.tensor([-1]))
    values = before[index] ^ after[index]
    bridges = (gaps - 1) // 65535
    if int(bridges.sum()):
        repeats = bridges + 1
        last = torch.cumsum(repeats, 0) - 1
        longer = torch.full((int(repeats.sum()),), 65535, dtype=torch.int64)
        longer[last] = gaps - bridges * 65535
        padded = torch.zeros(len(longer), dtype=values.dtype)
        padded[last] = values
        gaps, values = longer, padded
    short = gaps.to(torch.int32).numpy().astype(np.uint16)
    return [_compressor.compress(short.tobytes()), _compressor.compress(values.contiguous().numpy().tobytes())]


def _decode_gaps(fields: Fields, old: Cells, parts: Parts) -> Cells:
    gaps, values = (_decompressor.decompress(part) for part in parts)
    new = old.copy()
    index = np.cumsum(np.frombuffer(gaps, np.uint16), dtype=np.int64) - 1
    new[index] ^= np.frombuffer(values, old.dtype)
    return new


def _rice(numbers: npt.NDArray[np.int64]) -> Parts:
    """Quotients in unary, remainders of the width that suits the mean."""
    width = max(int(np.log2(max(float(numbers.mean()) * 0.69, 1))), 0) if len(numbers) else 0
    quotients = numbers >> width
    unary = np.zeros(int(quotients.sum()) + len(numbers), np.uint8)
    unary[np.cumsum(quotients + 1) - 1] = 1
    low = (numbers[:, None] >> np.arange(width) & 1).astype(np.uint8)
    return [bytes([width]), np.packbits(unary).tobytes(), np.packbits(low).tobytes()]


def _unrice(parts: Parts, count: int) -> npt.NDArray[np.int64]:
    width = parts[0][0]
    ends = np.flatnonzero(np.unpackbits(np.frombuffer(parts[1], np.uint8)))[:count]
    low = np.unpackbits(np.frombuffer(parts[2], np.uint8), count=count * width).reshape(count, width)
    return np.diff(ends, prepend=-1) - 1 << width | low.astype(np.int64) @ (1 << np.arange(width, dtype=np.int64))


def _encode_rice(fields: Fields, old: Cells, new: Cells) -> Parts:
    """Per exponent: gaps among that exponent's cells, and zigzag steps."""
    exponents = fields.exponents(old)
    changed = old != new
    parts: Parts = []
    for exponent in np.unique(exponents[changed]):
        members = np.flatnonzero(exponents == exponent)
        ranks = np.flatnonzero(changed[members])
        at = members[ranks]
        steps = (fields.ordered(new[at]).astype(np.uint64) - fields.ordered(old[at]).astype(np.uint64)).view(np.int64)
        zigzag = (steps << 1) ^ (steps >> 63)
        parts += [int(exponent).to_bytes(2, "little"), len(ranks).to_bytes(4, "little")]
        parts += _rice(np.diff(ranks, prepend=-1) - 1) + _rice(zigzag - 1)
    return parts


def _decode_rice(fields: Fields, old: Cells, parts: Parts) -> Cells:
    new = old.copy()
    exponents = fields.exponents(old)
    for at in range(0, len(parts), 8):
        count = int.from_bytes(parts[at + 1], "little")
        ranks = np.cumsum(_unrice(parts[at + 2 : at + 5], count) + 1) - 1
        zigzag = _unrice(parts[at + 5 : at + 8], count) + 1
        cells = np.flatnonzero(exponents == int.from_bytes(parts[at], "little"))[ranks]
        steps = (zigzag >> 1) ^ -(zigzag & 1)
        numbers = fields.ordered(old[cells]).astype(np.int64) + steps
        new[cells] = fields.unordered(numbers.astype(CELL_TYPES[fields.cell_bytes]))
    return new


PEERS: dict[str, Peer] = {
    "int32_index": Peer(_encode_index, _decode_index),
    "dense_xor_zstd1": Peer(_encode_xor, _decode_xor),
    "u16_gaps_xor_zstd1": Peer(_encode_gaps, _decode_gaps),
    "rice_gaps_by_exponent": Peer(_encode_rice, _decode_rice),
}
