"""Small made-up checkpoints, as bits, for tests and trials."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from dcr_s3.format.cells import Cells
from dcr_s3.format.dtypes import DTYPES, Dtype
from dcr_s3.targets.checkpoint import Checkpoint


@dataclass(frozen=True)
class Tensor:
    """One tensor as flat cells."""

    dtype: Dtype
    shape: tuple[int, ...]
    cells: Cells


State = dict[str, Tensor]

SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "embed": ("BF16", (40, 16)),
    "layer.0.q": ("BF16", (16, 16)),
    "layer.0.norm": ("F32", (16,)),
    "layer.1.w8": ("F8_E4M3", (8, 9)),
    "layer.1.scale": ("F32", ()),
    "mask": ("BOOL", (7,)),
    "steps": ("I64", (3,)),
    "empty": ("BF16", (0, 4)),
    "half": ("F16", (5, 5)),
    "wide": ("F64", (2, 3)),
}
"""Every cell size, a scalar, an empty tensor, odd sizes."""


def make_state(seed: int = 0, shapes: Mapping[str, tuple[str, tuple[int, ...]]] = SHAPES) -> State:
    """Random bits: NaN payloads, infinities and both zeros occur."""
    rng = np.random.default_rng(seed)
    state: State = {}
    for name, (dtype, shape) in shapes.items():
        kind = DTYPES[dtype]
        data = rng.bytes(kind.cells(prod(shape)) * kind.cell_bytes)
        cells: Cells = np.frombuffer(bytearray(data), f"<u{kind.cell_bytes}")
        state[name] = Tensor(kind, shape, cells & cells.dtype.type(1) if dtype == "BOOL" else cells)
    return state


def changed(state: State, seed: int, fraction: float = 0.1) -> State:
    """The state with about ``fraction`` of its cells replaced."""
    rng = np.random.default_rng(seed)
    result: State = {}
    for name, tensor in state.items():
        cells = tensor.cells.copy()
        hit = rng.random(cells.size) < fraction
        cells[hit] ^= rng.integers(1, 2 if tensor.dtype.name == "BOOL" else 4, int(hit.sum())).astype(cells.dtype)
        result[name] = Tensor(tensor.dtype, tensor.shape, cells)
    return result


def save(state: State, directory: Path, *, shards: int = 1) -> Path:
    """Writes a checkpoint directory in Hugging Face layout, with an index if it has several shards."""
    directory.mkdir(parents=True, exist_ok=True)
    names = list(state)
    files = (
        ["model.safetensors"] if shards == 1 else [f"model-{n:05d}-of-{shards:05d}.safetensors" for n in range(shards)]
    )
    for number, file in enumerate(files):
        write_safetensors(directory / file, {n: state[n] for n in names[number::shards]})
    if shards > 1:
        weight_map = {name: files[place % shards] for place, name in enumerate(names)}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text("{}")
    return directory


def load(directory: Path) -> State:
    """Reads a checkpoint directory back, as bits."""
    checkpoint = Checkpoint.open(directory)
    return {
        name: Tensor(place.dtype, place.shape, checkpoint.cells(name).copy())
        for name, place in checkpoint.places.items()
    }


def differing(a: State, b: State) -> list[str]:
    """Names whose dtype, shape or bits differ, and those only one side has."""
    names = a.keys() | b.keys()
    return sorted(
        n
        for n in names
        if n not in a
        or n not in b
        or (a[n].dtype, a[n].shape) != (b[n].dtype, b[n].shape)
        or not np.array_equal(a[n].cells, b[n].cells)
    )


def write_safetensors(path: Path, state: State) -> None:
    """One safetensors file; written here because the library's writers know no packed types and no bare bits."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in state.items():
        end = at + tensor.cells.nbytes
        header[name] = {"dtype": tensor.dtype.name, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in state.values():
            file.write(tensor.cells.tobytes())
