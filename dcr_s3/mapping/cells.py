"""Training tensors as flat cells: the same bits as unsigned integers, in host memory, at most a block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dcr_s3.errors import BadInput
from dcr_s3.format.cells import Cells
from dcr_s3.format.dtypes import DTYPES, Dtype

_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_VIEW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Source:
    """One tensor to be read as cells. ``pieces(max_bytes)`` gives them in canonical order as (first cell, flat array)
    of at most ``max_bytes`` each; ``whole()`` all at once."""

    dtype: Dtype
    shape: tuple[int, ...]
    pieces: Callable[[int], Iterator[tuple[int, Cells]]]
    whole: Callable[[], Cells]

    def same_bits(self, other: Source) -> bool:
        """True where both hold the same bits, NaN payloads and signs of zero included."""
        return np.array_equal(self.whole(), other.whole())


def tensor_source(name: str, tensor: object) -> Source:
    """A torch tensor, on any device. Pieces of a contiguous CPU tensor are views; others are copies made one at a time.

    Raises ``BadInput`` for what cannot be sent.
    """
    dtype, shape = describe_tensor(name, tensor)
    assert isinstance(tensor, torch.Tensor)
    plain = tensor.detach().resolve_conj().resolve_neg()
    return Source(
        dtype, shape, lambda max_bytes: _pieces(plain, max_bytes), lambda: flat_cells(plain.contiguous().reshape(-1))
    )


def mapped_source(dtype: Dtype, shape: tuple[int, ...], cells: Cells) -> Source:
    """Cells that are in host memory already."""

    def pieces(max_bytes: int) -> Iterator[tuple[int, Cells]]:
        step = max_bytes // cells.itemsize
        for start in range(0, cells.size, step):
            yield start, cells[start : start + step]

    return Source(dtype, shape, pieces, lambda: cells)


def describe_tensor(name: str, tensor: object) -> tuple[Dtype, tuple[int, ...]]:
    """Dtype and shape of a tensor as the run's table has them. Raises ``BadInput`` for what cannot be sent."""
    if not isinstance(tensor, torch.Tensor):
        raise BadInput(f"tensor {name}: is a {type(tensor).__name__}, not a torch.Tensor")
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise BadInput(f"tensor {name}: has no dense storage (layout {tensor.layout}, device {tensor.device})")
    if tensor.dtype not in _NAMES:
        raise BadInput(f"tensor {name}: dtype {tensor.dtype} has no place in a safetensors checkpoint")
    return DTYPES[_NAMES[tensor.dtype]], tuple(tensor.shape)


def _pieces(tensor: torch.Tensor, max_bytes: int) -> Iterator[tuple[int, Cells]]:
    width = tensor.element_size()
    if tensor.is_contiguous() or tensor.dim() < 2 or tensor.numel() * width <= max_bytes:
        flat = tensor.contiguous().reshape(-1)
        for start in range(0, flat.numel(), max_bytes // width):
            yield start, flat_cells(flat[start : start + max_bytes // width])
    else:
        yield from _rows(tensor, max_bytes)


def _rows(tensor: torch.Tensor, max_bytes: int) -> Iterator[tuple[int, Cells]]:
    """Groups of rows of a non-contiguous tensor, so that only one group is ever copied."""
    row_cells = tensor[0].numel()
    rows = max(1, max_bytes // (row_cells * tensor.element_size()))
    for first in range(0, tensor.shape[0], rows):
        for start, cells in _pieces(tensor[first : first + rows].contiguous(), max_bytes):
            yield first * row_cells + start, cells


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of safetensors' name. Raises ``BadInput`` for a type that torch does not have."""
    if name not in _DTYPES:
        raise BadInput(f"torch has no dtype for {name}")
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """safetensors' name of torch's dtype. Raises ``BadInput`` for one that no checkpoint can hold."""
    if dtype not in _NAMES:
        raise BadInput(f"dtype {dtype} has no place in a safetensors checkpoint")
    return _NAMES[dtype]


def flat_cells(flat: torch.Tensor) -> Cells:
    """A flat contiguous tensor as cells in host memory; a CPU tensor's memory is shared."""
    width = flat.element_size()
    array: np.ndarray[Any, Any] = flat.view(_VIEW[width]).cpu().numpy()
    return array.view(f"<u{width}")


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True where two tensors are the same cells of the same memory (tied weights)."""
    return (
        a.numel() > 0
        and a.device == b.device
        and a.data_ptr() == b.data_ptr()
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
    )


def host_cells(tensor: torch.Tensor) -> Cells:
    """All cells of a tensor as a flat copy in host memory."""
    return tensor_source("", tensor).whole().copy()
