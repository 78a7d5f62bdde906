"""Compares checkpoint directories by what safetensors reads, independently of everything this package does."""

from __future__ import annotations

import hashlib
from pathlib import Path

from safetensors import deserialize

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def read_tensors(directory: Path) -> Tensors:
    """Name to dtype, shape and bytes, of all safetensors files of a directory."""
    return {
        name: (str(found["dtype"]), tuple(found["shape"]), bytes(found["data"]))
        for path in sorted(directory.glob("*.safetensors"))
        for name, found in deserialize(path.read_bytes())
    }


def checkpoint_bits(directory: Path) -> str:
    """SHA-256 over name, dtype, shape and bytes of all tensors of a directory, in order of name."""
    digest = hashlib.sha256()
    for name, (dtype, shape, data) in sorted(read_tensors(directory).items()):
        digest.update(f"{name} {dtype} {shape}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def differing_tensors(one: Path, other: Path) -> list[str]:
    """Names of the tensors that only one directory has, or that differ in type, shape or any bit."""
    ours, theirs = read_tensors(one), read_tensors(other)
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
