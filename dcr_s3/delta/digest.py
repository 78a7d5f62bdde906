"""The state digest's key schedule and entry points; the sums themselves are a kernel.

Every cell of a tensor adds a keyed mix of its canonical index and its stored bits to two 64-bit sums. The key is a
function of the tensor's identity alone, so equal checkpoints have equal digests in every run.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dcr_s3.delta import kernels
from dcr_s3.delta.changes import Cells
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.dtypes import Dtype


@dataclass(frozen=True)
class TensorKey:
    """Four 32-bit words that make one tensor's terms its own."""

    words: tuple[int, int, int, int]


def tensor_key(name: str, dtype: Dtype, shape: tuple[int, ...]) -> TensorKey:
    """Key of the tensor of this name, type and shape: BLAKE2b of the three."""
    encoded = name.encode()
    parts = [struct.pack("<I", len(encoded)), encoded, struct.pack("<HI", dtype.code, len(shape))]
    parts += [struct.pack("<Q", extent) for extent in shape]
    digest = hashlib.blake2b(b"".join(parts), digest_size=16, person=b"dcr_s3 state 1").digest()
    return TensorKey(struct.unpack("<4I", digest))


def digest_range(key: TensorKey, start: int, cells: Cells) -> StateDigest:
    """Sums over contiguous ``cells`` whose first has canonical cell index ``start``."""
    return StateDigest(*kernels.active().digest_range(key.words, start, cells))


def digest_at(key: TensorKey, indices: npt.NDArray[np.uint64], cells: Cells) -> StateDigest:
    """Sums over ``cells`` at canonical cell ``indices`` (uint64, one per cell, any order)."""
    if len(indices) != len(cells):
        raise ValueError(f"{len(indices)} indices for {len(cells)} cells")
    return StateDigest(*kernels.active().digest_at(key.words, indices, cells))
