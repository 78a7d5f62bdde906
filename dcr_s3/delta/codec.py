"""Blocks: choose a coding, encode, decode, apply."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dcr_s3.delta import clock, dense, kernels
from dcr_s3.delta.changes import CELL_TYPES, Cells, Changes, Pieces, Positions, joined, total_cells
from dcr_s3.delta.fields import Fields
from dcr_s3.errors import BadInput, CorruptObject
from dcr_s3.format.codings import Coding
from dcr_s3.format.dtypes import Dtype

_SPARSE = 8
"""Dense codings are tried where at least one cell in this many changed."""


class EncodedBlock(NamedTuple):
    """One block as it goes on the wire, and the changes it stands for."""

    coding: Coding
    payload: bytes
    changes: Changes


def encode_block(dtype: Dtype, old: Pieces, new: Pieces, *, context: bool) -> EncodedBlock:
    """Compare ``new`` with ``old``, choose the smallest coding, encode.

    ``old`` and ``new`` hold the same number of cells, in pieces that may be cut differently. With ``context`` the
    decoder needs the old cells to find the changed positions. Neither side is written to.
    Raises BadInput where the two differ in size or a piece is not of the type's cells.
    """
    _check(dtype, old)
    _check(dtype, new)
    if total_cells(old) != total_cells(new):
        raise BadInput(f"a block of {total_cells(old)} cells is compared with {total_cells(new)}")
    changes = kernels.active().scan(old, new, dtype.cell_bytes)
    if not len(changes.positions):
        return EncodedBlock(Coding.NONE, b"", changes)
    fields = Fields.of(dtype)
    model, position_bits = clock.choose_model(fields, old, changes, context=context)
    if len(changes.positions) * _SPARSE < total_cells(old):
        return EncodedBlock(*clock.encode(fields, model, old, changes), changes)
    best = _encode_dense(dtype, old, new)
    if position_bits + clock.estimated_step_bits(fields, changes) < 8 * len(best[1]):
        best = min(clock.encode(fields, model, old, changes), best, key=lambda coded: len(coded[1]))
    return EncodedBlock(*best, changes)


def _encode_dense(dtype: Dtype, old: Pieces, new: Pieces) -> tuple[Coding, bytes]:
    after = joined(new, dtype.cell_bytes)
    plain = dense.pack(after)
    xor = dense.pack(joined(old, dtype.cell_bytes) ^ after)
    return (Coding.DENSE_XOR, xor) if len(xor) <= len(plain) else (Coding.DENSE_PLAIN, plain)


def decode_block(dtype: Dtype, coding: Coding, payload: bytes | memoryview, changed: int, old: Pieces) -> Changes:
    """The changes that ``payload`` describes, given the cells it was made against.

    ``changed`` is the number of changed cells that the block declares. Raises CorruptObject on any malformed payload.
    Other old cells than the encoder's give CorruptObject or wrong changes, which the caller detects by state digest.
    """
    _check(dtype, old)
    cells = total_cells(old)
    if changed > cells:
        raise CorruptObject(f"a block of {cells} cells declares {changed} changes")
    if (coding is Coding.NONE) != (changed == 0) or (coding is Coding.NONE and len(payload)):
        raise CorruptObject(f"a block coded as {coding.name} declares {changed} changes in {len(payload)} bytes")
    if coding is Coding.NONE:
        empty = np.empty(0, CELL_TYPES[dtype.cell_bytes])
        return Changes(np.empty(0, np.uint32), empty, empty)
    if coding in (Coding.CLOCK_FREE, Coding.CLOCK_CONTEXT):
        return clock.decode(Fields.of(dtype), coding, payload, changed, old)
    return _decode_dense(dtype, coding, payload, changed, old)


def _decode_dense(dtype: Dtype, coding: Coding, payload: bytes | memoryview, changed: int, old: Pieces) -> Changes:
    before = joined(old, dtype.cell_bytes)
    after = dense.unpack(payload, len(before), dtype.cell_bytes)
    if coding is Coding.DENSE_XOR:
        after = after ^ before
    changes: Changes = kernels.active().scan([before], [after], dtype.cell_bytes)
    if len(changes.positions) != changed:
        raise CorruptObject(f"a dense block declares {changed} changes and holds {len(changes.positions)}")
    return changes


def apply_changes(dest: Pieces, positions: Positions, values: Cells) -> None:
    """Write ``values`` (cells) at strictly ascending ``positions`` (uint32) of ``dest``.

    Raises ValueError, having written nothing, where a position is not a cell of ``dest``.
    """
    kernels.active().apply_changes(dest, positions, values)


def _check(dtype: Dtype, pieces: Pieces) -> None:
    expected = CELL_TYPES[dtype.cell_bytes]
    for piece in pieces:
        if piece.dtype != expected or piece.ndim != 1:
            raise BadInput(f"a piece of {dtype.name} is {piece.dtype} of shape {piece.shape}; pass {expected}, flat")
