"""Tiny checkpoints, written without the package's help."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

FILE = "model.safetensors"
_Tensors = Sequence[tuple[str, str, tuple[int, ...], int]]
SEVERAL: _Tensors = (("embed", "BF16", (8, 3), 2), ("scale", "F32", (5,), 4), ("norm", "BF16", (4,), 2))
"""Name, dtype, shape and width in bytes. Two dtypes make two blocks, hence two segments."""
ONE: _Tensors = SEVERAL[:1]


class TinyModel:
    """States 0 to ``count - 1`` of one model, each a directory below ``root``: some cells differ from the state before.

    The last state is the first one again.
    """

    def __init__(self, root: Path, count: int, tensors: _Tensors = SEVERAL) -> None:
        self.root = root
        self._tensors = tensors
        dice = random.Random(count)
        size = sum(prod(shape) * width for _, _, shape, width in tensors)
        bodies = [bytearray(dice.randbytes(size))]
        while len(bodies) < count - 1:
            bodies.append(_changed(bodies[-1], tensors, dice))
        self.files = [_header(tensors) + bytes(b) for b in [*bodies, bodies[0]][:count]]
        for number, file in enumerate(self.files):
            self.directory(number).mkdir(parents=True)
            (self.directory(number) / FILE).write_bytes(file)

    def tensors(self, number: int) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
        """Name, dtype, shape and bytes of every tensor of one state."""
        at = len(_header(self._tensors))
        for name, dtype, shape, width in self._tensors:
            end = at + prod(shape) * width
            yield name, dtype, shape, self.files[number][at:end]
            at = end

    def directory(self, number: int) -> Path:
        """The checkpoint of one state."""
        return self.root / f"state-{number}"


def _header(tensors: _Tensors) -> bytes:
    entries, at = {}, 0
    for name, dtype, shape, width in tensors:
        end = at + prod(shape) * width
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    raw = json.dumps(entries).encode()
    return len(raw).to_bytes(8, "little") + raw


def _changed(body: bytearray, tensors: _Tensors, dice: random.Random) -> bytearray:
    """One or two cells of every tensor get other bits."""
    result, at = bytearray(body), 0
    for _, _, shape, width in tensors:
        for _ in range(dice.choice((1, 2))):
            result[at + dice.randrange(prod(shape) * width)] ^= dice.randrange(1, 256)
        at += prod(shape) * width
    return result
