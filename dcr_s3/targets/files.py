"""A state as the files of a checkpoint directory: those that exist, or those that would be written."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dcr_s3.format.cells import Cells
from dcr_s3.format.run import TensorSpec
from dcr_s3.targets.checkpoint import Checkpoint
from dcr_s3.targets.copy import companion_files

_CHUNK_BYTES = 16 << 20
_SHARD_BYTES = 4 << 30


@dataclass(frozen=True)
class SourceFile:
    """One file. ``read()`` gives its bytes in pieces of 16 MiB, save the last."""

    name: str
    size_bytes: int
    read: Callable[[], Iterator[bytearray]]


def directory_files(checkpoint: Checkpoint) -> list[SourceFile]:
    """The files of a checkpoint directory: tensors, configuration, tokenizer, index."""
    paths = [*(checkpoint.directory / name for name in checkpoint.tensor_files), *companion_files(checkpoint)]
    return [SourceFile(path.name, path.stat().st_size, partial(_read, path)) for path in paths]


def _read(path: Path) -> Iterator[bytearray]:
    with path.open("rb") as handle:
        while piece := bytearray(handle.read(_CHUNK_BYTES)):
            yield piece


def state_files(specs: Sequence[TensorSpec], cells: Callable[[int], Cells]) -> list[SourceFile]:
    """Cells in RAM as safetensors files of at most 4 GiB (or one tensor), with an index if there are several.

    ``cells(n)`` gives the flat cells of tensor number n. A tied tensor is stored once, under its first name.
    """
    shards: list[list[int]] = [[]]
    filled = 0
    for number, spec in enumerate(specs):
        if shards[-1] and filled + spec.size_bytes > _SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(number)
        filled += spec.size_bytes
    if len(shards) == 1:
        return [_shard("model.safetensors", specs, shards[0], cells)]
    names = [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    weight_map = {specs[number].name: name for name, shard in zip(names, shards, strict=True) for number in shard}
    size = sum(spec.size_bytes for spec in specs)
    index = json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2).encode()
    files = [_shard(name, specs, shard, cells) for name, shard in zip(names, shards, strict=True)]
    return [*files, SourceFile("model.safetensors.index.json", len(index), lambda: iter([bytearray(index)]))]


def _shard(name: str, specs: Sequence[TensorSpec], numbers: Sequence[int], cells: Callable[[int], Cells]) -> SourceFile:
    # Wider cells first, so that every tensor is aligned to its cell size.
    order = sorted(numbers, key=lambda number: -specs[number].type.cell_bytes)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for number in order:
        spec = specs[number]
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.size_bytes],
        }
        at += spec.size_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text

    def read() -> Iterator[bytearray]:
        piece = bytearray(head)
        for number in order:
            raw = cells(number).reshape(-1).data.cast("B")
            for start in range(0, len(raw), _CHUNK_BYTES):
                piece += raw[start : start + _CHUNK_BYTES]
                while len(piece) >= _CHUNK_BYTES:
                    yield piece[:_CHUNK_BYTES]
                    piece = piece[_CHUNK_BYTES:]
        if piece:
            yield piece

    return SourceFile(name, len(head) + at, read)
