"""A checkpoint directory in Hugging Face layout, memory-mapped: safetensors files, and an index where there are
several.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dcr_s3.errors import BadInput
from dcr_s3.format import limits
from dcr_s3.format.cells import Cells
from dcr_s3.format.dtypes import DTYPES, Dtype
from dcr_s3.format.run import TensorSpec
from dcr_s3.world import world

HEADER_LIMIT_BYTES = 100_000_000
"""Of a safetensors file."""

_INDEX_SUFFIX = ".safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True)
class TensorPlace:
    """Where one tensor's bytes lie. ``offset`` counts from the start of the file."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    file: str
    offset: int
    size_bytes: int

    @property
    def cells(self) -> int:
        return self.size_bytes // self.dtype.cell_bytes


class Checkpoint:
    """The tensors of a checkpoint directory (or of one safetensors file) as flat arrays of unsigned cells.

    Raises ``BadInput`` naming the file or tensor for anything missing, truncated or contradictory.
    """

    def __init__(self, directory: Path, places: Mapping[str, TensorPlace], *, writable: bool) -> None:
        self.directory = directory
        self.places = dict(places)
        self._files: dict[str, npt.NDArray[np.uint8]] = {}
        for file in sorted({p.file for p in places.values()}):
            self._files[file] = np.memmap(directory / file, np.uint8, "r+" if writable else "r")

    @classmethod
    def open(cls, path: Path, *, writable: bool = False) -> Checkpoint:
        """Reads the headers and maps the files; bytes are read when cells are."""
        directory, places = _find(Path(path))
        return cls(directory, places, writable=writable)

    @property
    def tensor_files(self) -> list[str]:
        """Names of the safetensors files in use."""
        return list(self._files)

    def cells(self, name: str) -> Cells:
        """All cells of a tensor, flat, a view of the mapped file (perhaps unaligned)."""
        place = self.places[name]
        raw = self._files[place.file][place.offset : place.offset + place.size_bytes]
        return raw.view(f"<u{place.dtype.cell_bytes}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def flush(self) -> None:
        """Writes changed pages to disk (msync)."""
        for mapped in self._files.values():
            if isinstance(mapped, np.memmap):
                world().sync_map(mapped)


def _find(path: Path) -> tuple[Path, dict[str, TensorPlace]]:
    if path.is_file():
        return path.parent, read_header(path)
    if not path.is_dir():
        raise BadInput(f"checkpoint {path}: no such file or directory")
    indexes = sorted(path.glob("*" + _INDEX_SUFFIX))
    if len(indexes) > 1:
        raise BadInput(
            f"checkpoint {path}: has {len(indexes)} index files ({', '.join(i.name for i in indexes)}); keep one"
        )
    if indexes:
        return path, _read_indexed(path, indexes[0])
    files = [path / _SINGLE] if (path / _SINGLE).is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise BadInput(f"checkpoint {path}: holds no safetensors file")
    places: dict[str, TensorPlace] = {}
    for file in files:
        for name, place in read_header(file).items():
            if name in places:
                raise BadInput(f"checkpoint {path}: tensor {name} is in {places[name].file} and in {file.name}")
            places[name] = place
    return path, places


def _read_indexed(directory: Path, index: Path) -> dict[str, TensorPlace]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        wanted = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f"{index}: is no valid index (weight_map is missing or malformed)") from None
    places: dict[str, TensorPlace] = {}
    for file in sorted(set(wanted.values())):
        if "/" in file or file.startswith(".") or not (directory / file).is_file():
            raise BadInput(f"checkpoint {directory}: shard {file}, which {index.name} names, is missing")
        for name, place in read_header(directory / file).items():
            if wanted.get(name) != file:
                raise BadInput(f"checkpoint {directory}: tensor {name} is in {file}, but {index.name} says otherwise")
            places[name] = place
    absent = sorted(set(wanted) - set(places))
    if absent:
        raise BadInput(
            f"checkpoint {directory}: tensor {absent[0]} is not in {wanted[absent[0]]} (and {len(absent) - 1} more)"
        )
    return places


def read_header(file: Path) -> dict[str, TensorPlace]:
    """The tensors of one safetensors file, in file order. Checks that they fill the file exactly."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > HEADER_LIMIT_BYTES or 8 + length > size:
            raise BadInput(f"{file}: truncated, or no safetensors file")
        raw = handle.read(length)
    try:
        header = json.loads(raw)
        entries = [
            (str(name), entry["dtype"], tuple(entry["shape"]), begin, end)
            for name, entry in header.items()
            if name != "__metadata__"
            for begin, end in [entry["data_offsets"]]
        ]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise BadInput(f"{file}: its safetensors header is malformed") from None
    places: dict[str, TensorPlace] = {}
    at = 0
    for name, dtype, shape, begin, end in sorted(entries, key=lambda e: (e[3], e[4])):
        if dtype not in DTYPES:
            raise BadInput(f"{file}: tensor {name} has dtype {dtype!r}, which this release does not know")
        if not all(type(n) is int and n >= 0 for n in (begin, end, *shape)) or prod(shape) > limits.TENSOR_CELLS:
            raise BadInput(f"{file}: tensor {name} has an impossible shape or place")
        try:
            expected = DTYPES[dtype].cells(prod(shape)) * DTYPES[dtype].cell_bytes
        except ValueError as error:
            raise BadInput(f"{file}: tensor {name}: {error}") from None
        if begin != at or end - begin != expected:
            raise BadInput(f"{file}: tensor {name} of shape {list(shape)} does not lie where it should")
        at = end
        places[name] = TensorPlace(name, DTYPES[dtype], shape, file.name, 8 + length + begin, expected)
    if 8 + length + at != size:
        raise BadInput(
            f"{file}: has {size} bytes, its header announces {8 + length + at}; the file is truncated or damaged"
        )
    return places


def match_checkpoint(checkpoint: Checkpoint, specs: Sequence[TensorSpec]) -> list[list[Cells]]:
    """The checkpoint's cells by tensor number.

    Raises ``BadInput`` naming what is missing, unknown or of another shape.
    """
    unknown = set(checkpoint)
    result: list[list[Cells]] = []
    missing: list[str] = []
    for spec in specs:
        found = [name for name in (spec.name, *spec.aliases) if name in checkpoint.places]
        for name in found:
            place = checkpoint.places[name]
            if place.dtype.name != spec.dtype or place.shape != spec.shape:
                raise BadInput(
                    f"{checkpoint.directory}: tensor {name} is {place.dtype.name} {list(place.shape)}, "
                    f"the run has {spec.dtype} {list(spec.shape)}"
                )
        unknown -= set(found)
        missing += [] if found else [spec.name]
        result.append([checkpoint.cells(name) for name in found])
    if missing:
        raise BadInput(f"{checkpoint.directory}: lacks {describe(missing)}")
    if unknown:
        raise BadInput(f"{checkpoint.directory}: has {describe(sorted(unknown))}, unknown to the run")
    return result


def describe(names: Sequence[str], limit: int = 3) -> str:
    """Some names for a message: the first few and how many more."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    word = "tensor " if len(names) == 1 else "tensors "
    return word + ", ".join(names[:limit]) + more if names else ""
