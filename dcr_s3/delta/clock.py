"""Clock-coded blocks: header, signs, stream of positions, stream of values.

model header (2 bytes with one class, 19 with sixteen), u32 length of the stream of positions,
signs, stream of positions, stream of values
"""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np

from dcr_s3.delta import kernels
from dcr_s3.delta.changes import Cells, Changes, Pieces
from dcr_s3.delta.fields import Fields
from dcr_s3.delta.model import HazardModel, Tally, context_model, free_model, position_bits
from dcr_s3.delta.tables import CLASSES
from dcr_s3.errors import CorruptObject
from dcr_s3.format.codings import Coding

_LENGTH = struct.Struct("<I")
_STEP_SAMPLE = 4096
_WORTHWHILE = 0.99
"""A context that saves less is left alone: without it, decoding takes half the time."""
_HALVED_CHANGES = 1024
"""Changes from which the ten bytes that halving costs are nothing."""


def choose_model(fields: Fields, cells: int, tally: Tally, *, context: bool) -> HazardModel:
    """The model with the fewest bits for a block of ``cells``; without ``context``, one that needs no old cells."""
    best = free_model(tally)
    if context and fields.exponent_mask:
        rich = context_model(tally)
        free_bits, rich_bits = (position_bits(model, tally) * cells + 8 * len(model.codes) for model in (best, rich))
        best = rich if rich_bits < _WORTHWHILE * free_bits else best
    return replace(best, halved=tally.density * cells >= _HALVED_CHANGES)


def estimated_step_bits(fields: Fields, changes: Changes) -> float:
    """About how many bits the signs and steps take, from a sample of them."""
    count = len(changes.positions)
    sample = slice(None, None, max(count // _STEP_SAMPLE, 1))
    before, after = fields.ordered(changes.old[sample]), fields.ordered(changes.new[sample])
    steps = np.where(after > before, after - before, before - after).astype(np.float64)
    lengths = np.frexp(steps)[1] - 1
    shares = np.bincount(lengths) / len(lengths)
    entropy = -float(np.sum(shares * np.log2(np.maximum(shares, 1e-300))))
    return count * (1 + entropy + float(lengths.mean()))


def pack(fields: Fields, model: HazardModel, positions: bytes, changes: Changes) -> tuple[Coding, bytes]:
    """Payload for ``changes``, of which there is at least one, and whose ``positions`` are coded already."""
    signs, values = kernels.active().encode_values(changes.old, changes.new, fields, model)
    coding = Coding.CLOCK_FREE if len(model.codes) == 1 else Coding.CLOCK_CONTEXT
    return coding, b"".join((model.pack(), _LENGTH.pack(len(positions)), signs, positions, values))


def decode(
    fields: Fields, coding: Coding, payload: bytes | memoryview, changed: int, old: Pieces, *, partial: bool = False
) -> Changes:
    """Inverse of :func:`pack`. Raises CorruptObject on a payload that no encoder writes.

    With ``partial``, old cells may be wrong in a context-free block; where they are, the new ones are too.
    """
    classes = 1 if coding is Coding.CLOCK_FREE else CLASSES
    view = memoryview(payload)
    header_bytes = HazardModel.header_bytes(classes)
    signs_at = header_bytes + _LENGTH.size
    positions_at = signs_at + (changed + 7) // 8
    if len(view) < positions_at:
        raise CorruptObject(f"a clock-coded block of {changed} changes is cut short at {len(view)} bytes")
    model = HazardModel.unpack(bytes(view[:header_bytes]), classes)
    if model.first_exponent > fields.exponent_mask:
        raise CorruptObject(f"a clock-coded block starts its classes at exponent {model.first_exponent}")
    values_at = positions_at + _LENGTH.unpack_from(view, header_bytes)[0]
    if len(view) < values_at:
        raise CorruptObject(f"a clock-coded block ends at {len(view)} bytes, before its stream of values")
    kernel = kernels.active()
    positions, before = kernel.decode_positions(view[positions_at:values_at], changed, old, fields, model)
    signs, stream = view[signs_at:positions_at], view[values_at:]
    decode_values = _decode_steps if partial and coding is Coding.CLOCK_FREE else kernel.decode_values
    return Changes(positions, before, decode_values(signs, stream, before, fields, model))


def _decode_steps(signs: memoryview, stream: memoryview, old: Cells, fields: Fields, model: HazardModel) -> Cells:
    """New cells from old ones that may be wrong: steps are decoded from the end of the range that they lead away from,
    and taken modulo the range.
    """
    grew = np.unpackbits(np.frombuffer(signs, np.uint8), bitorder="little")[: len(old)].astype(np.bool_)
    ends = fields.unordered(np.where(grew, old.dtype.type(0), ~old.dtype.type(0)))
    reached = kernels.active().decode_values(signs, stream, ends, fields, model)
    moved: Cells = fields.ordered(reached) - fields.ordered(ends)
    return fields.unordered(fields.ordered(old) + moved)
