"""The range coder of clock-coded streams: forward on both sides, carries propagated, no division in the encoder."""

from __future__ import annotations

from dcr_s3.errors import CorruptObject

_TOP = 1 << 56
_BOTTOM = 1 << 48
_LOW_MASK = _BOTTOM - 1


class RangeEncoder:
    """Narrows an interval of 56-bit numbers and writes out its leading bytes as they become certain."""

    def __init__(self) -> None:
        self._low = 0
        self._range = _TOP
        self._out = bytearray()

    def encode(self, start: int, size: int, total_bits: int) -> None:
        """The symbol that has [start, start + size) out of 2**total_bits (at most 36)."""
        unit = self._range >> total_bits
        self._advance(unit * start, unit * size)

    def encode_flag(self, flag: bool, chance: int) -> None:
        """A flag that is false with probability ``chance`` / 65536."""
        bound = (self._range >> 16) * chance
        self._advance(*((bound, self._range - bound) if flag else (0, bound)))

    def finish(self) -> bytes:
        """The stream. One more byte is enough, as zeros follow it."""
        self._low += _LOW_MASK
        self._carry()
        self._out.append(self._low >> 48)
        return bytes(self._out)

    def _advance(self, start: int, size: int) -> None:
        self._low += start
        self._range = size
        self._carry()
        while self._range < _BOTTOM:
            self._out.append(self._low >> 48)
            self._low = (self._low & _LOW_MASK) << 8
            self._range <<= 8

    def _carry(self) -> None:
        if self._low < _TOP:
            return
        self._low -= _TOP
        last = len(self._out) - 1
        while self._out[last] == 0xFF:
            self._out[last] = 0
            last -= 1
        self._out[last] += 1


class RangeDecoder:
    """Reads what RangeEncoder wrote. Past its end a stream reads as zeros; :meth:`finish` tells whether it fitted."""

    def __init__(self, stream: bytes | memoryview) -> None:
        self._stream = bytes(stream)
        self._offset = int.from_bytes(self._stream[:7].ljust(7, b"\0"), "big")
        self._next = 7
        self._range = _TOP

    def point(self, total_bits: int) -> int:
        """Where in 0 .. 2**total_bits the coded symbol lies. Raises CorruptObject where no encoder would have gone."""
        point = self._offset // (self._range >> total_bits)
        if point >> total_bits:
            raise CorruptObject("a clock-coded stream points outside its range")
        return point

    def consume(self, start: int, size: int, total_bits: int) -> None:
        """Go past the symbol that has [start, start + size) out of 2**total_bits."""
        unit = self._range >> total_bits
        self._advance(unit * start, unit * size)

    def flag(self, chance: int) -> bool:
        """The next flag, which is false with probability ``chance`` / 65536."""
        bound = (self._range >> 16) * chance
        flag = self._offset >= bound
        self._advance(*((bound, self._range - bound) if flag else (0, bound)))
        return flag

    def finish(self) -> None:
        """Raises CorruptObject unless the stream ended exactly here."""
        if self._next - 6 != len(self._stream):
            raise CorruptObject("a clock-coded stream is longer or shorter than what it codes")

    def _advance(self, start: int, size: int) -> None:
        self._offset -= start
        self._range = size
        while self._range < _BOTTOM:
            byte = self._stream[self._next] if self._next < len(self._stream) else 0
            self._offset = self._offset << 8 | byte
            self._next += 1
            self._range <<= 8
