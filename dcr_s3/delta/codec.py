"""Blocks: choose a coding, encode, decode, apply."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dcr_s3.delta import clock, dense, kernels
from dcr_s3.delta.changes import CELL_TYPES, Cells, Changes, Pieces, Positions, joined, total_cells
from dcr_s3.delta.fields import Fields
from dcr_s3.delta.model import Tally, position_bits
from dcr_s3.errors import BadInput, CorruptObject
from dcr_s3.format.codings import Coding
from dcr_s3.format.dtypes import Dtype

_SAMPLED_CELLS = 1 << 16
"""A tally samples at least this many cells."""

_WIDEST_STRIDE_LOG2 = 6
"""A tally samples at least one cell in 2**6."""

_TELLING_CHANGES = 512
"""Sampled changes from which the hazards are as good as counted ones (0.3 % of the size at worst)."""

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
    fields = Fields.of(dtype)
    stride_log2 = min(max((total_cells(old) // _SAMPLED_CELLS).bit_length() - 1, 0), _WIDEST_STRIDE_LOG2)
    tally = kernels.active().tally(old, new, fields, stride_log2)
    if tally.density >= 1 / _SPARSE:
        return _encode_thick(dtype, old, new, tally, context=context)
    if tally.sampled and sum(tally.changed) < _TELLING_CHANGES:
        return _encode_thin(fields, old, new, tally, context=context)
    return _encode_usual(fields, old, new, tally, context=context)


def _encode_usual(fields: Fields, old: Pieces, new: Pieces, tally: Tally, *, context: bool) -> EncodedBlock:
    """One pass: the tally already tells the hazards."""
    if not tally.density:
        return _unchanged(fields)
    model = clock.choose_model(fields, total_cells(old), tally, context=context)
    changes, positions = kernels.active().scan_positions(old, new, fields, model, tally.density)
    return EncodedBlock(*clock.pack(fields, model, positions, changes), changes)


def _encode_thin(fields: Fields, old: Pieces, new: Pieces, tally: Tally, *, context: bool) -> EncodedBlock:
    """Two passes: with few changes a sample of them says too little, and all of them are quickly counted."""
    kernel = kernels.active()
    changes = kernel.scan(old, new, fields.cell_bytes, tally.density)
    if not len(changes.positions):
        return _unchanged(fields)
    scale = total_cells(old) / sum(tally.cells)
    counted = Tally([cells * scale for cells in tally.cells], kernel.count_exponents(changes.old, fields), False)
    model = clock.choose_model(fields, total_cells(old), counted, context=context)
    positions = kernel.encode_positions(old, changes.positions, fields, model)
    return EncodedBlock(*clock.pack(fields, model, positions, changes), changes)


def _encode_thick(dtype: Dtype, old: Pieces, new: Pieces, tally: Tally, *, context: bool) -> EncodedBlock:
    """Whichever is smallest of the dense codings and, where it has a chance, the clock."""
    fields = Fields.of(dtype)
    changes = kernels.active().scan(old, new, fields.cell_bytes, tally.density)
    if not len(changes.positions):
        return _unchanged(fields)
    best = _encode_dense(dtype, old, new)
    model = clock.choose_model(fields, total_cells(old), tally, context=context)
    bits = position_bits(model, tally) * total_cells(old) + clock.estimated_step_bits(fields, changes)
    if bits < 8 * len(best[1]):
        positions = kernels.active().encode_positions(old, changes.positions, fields, model)
        best = min(clock.pack(fields, model, positions, changes), best, key=lambda coded: len(coded[1]))
    return EncodedBlock(*best, changes)


def _encode_dense(dtype: Dtype, old: Pieces, new: Pieces) -> tuple[Coding, bytes]:
    after = joined(new, dtype.cell_bytes)
    plain = dense.pack(after)
    xor = dense.pack(joined(old, dtype.cell_bytes) ^ after)
    return (Coding.DENSE_XOR, xor) if len(xor) <= len(plain) else (Coding.DENSE_PLAIN, plain)


def decode_block(
    dtype: Dtype, coding: Coding, payload: bytes | memoryview, changed: int, old: Pieces, *, partial: bool = False
) -> Changes:
    """The changes that ``payload`` describes, given the cells it was made against.

    ``changed`` is the number of changed cells that the block declares. Raises CorruptObject on any malformed payload.
    Other old cells than the encoder's give CorruptObject or wrong changes, which the caller detects by state digest.

    With ``partial``, some old cells are not known and may be anything. Every change of a known cell is then right, and
    none is missing; what is said about other cells means nothing. A coding with context cannot be read so.
    """
    _check(dtype, old)
    cells = total_cells(old)
    if changed > cells:
        raise CorruptObject(f"a block of {cells} cells declares {changed} changes")
    if (coding is Coding.NONE) != (changed == 0) or (coding is Coding.NONE and len(payload)):
        raise CorruptObject(f"a block coded as {coding.name} declares {changed} changes in {len(payload)} bytes")
    if partial and coding is Coding.CLOCK_CONTEXT:
        raise ValueError("a coding with context needs all old cells")
    if coding is Coding.NONE:
        return _unchanged(Fields.of(dtype)).changes
    if coding in (Coding.CLOCK_FREE, Coding.CLOCK_CONTEXT):
        return clock.decode(Fields.of(dtype), coding, payload, changed, old, partial=partial)
    return _decode_dense(dtype, coding, payload, changed, old, partial=partial)


def _decode_dense(
    dtype: Dtype, coding: Coding, payload: bytes | memoryview, changed: int, old: Pieces, *, partial: bool
) -> Changes:
    before = joined(old, dtype.cell_bytes)
    after = dense.unpack(payload, len(before), dtype.cell_bytes)
    if coding is Coding.DENSE_XOR:
        after = after ^ before
    changes: Changes = kernels.active().scan([before], [after], dtype.cell_bytes, changed / max(len(before), 1))
    if len(changes.positions) != changed and not partial:
        raise CorruptObject(f"a dense block declares {changed} changes and holds {len(changes.positions)}")
    return changes


def apply_changes(dest: Pieces, positions: Positions, values: Cells) -> None:
    """Write ``values`` (cells) at strictly ascending ``positions`` (uint32) of ``dest``.

    Raises ValueError, having written nothing, where a position is not a cell of ``dest``.
    """
    kernels.active().apply_changes(dest, positions, values)


def _unchanged(fields: Fields) -> EncodedBlock:
    empty = np.empty(0, CELL_TYPES[fields.cell_bytes])
    return EncodedBlock(Coding.NONE, b"", Changes(np.empty(0, np.uint32), empty, empty))


def _check(dtype: Dtype, pieces: Pieces) -> None:
    expected = CELL_TYPES[dtype.cell_bytes]
    for piece in pieces:
        if piece.dtype != expected or piece.ndim != 1:
            raise BadInput(f"a piece of {dtype.name} is {piece.dtype} of shape {piece.shape}; pass {expected}, flat")
        if not piece.flags.c_contiguous:
            raise BadInput(f"a piece of {dtype.name} has gaps between its cells; pass contiguous pieces")
