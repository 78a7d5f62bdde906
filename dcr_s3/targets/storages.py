"""The memory of an engine: every storage its parameters, buffers and other tensors lie in, as flat cells."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dcr_s3.errors import BadInput, StateMismatch
from dcr_s3.format.cells import Cells
from dcr_s3.format.run import TensorSpec

_TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_CELLS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory; valid while the storage lives."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True)
class Storage:
    """One storage. ``cells``: all its elements, flat, as integers of their width; ``names``: tensors that lie in it."""

    names: tuple[str, ...]
    cells: torch.Tensor
    is_parameter: bool

    def view(self, start: int, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        """A strided box of its cells."""
        return self.cells.as_strided(tuple(shape), tuple(strides), start)


class Storages:
    """All storages of an engine, numbered. ``tensors``: its parameters and buffers by name, as the engine holds them;
    ``others``: tensors that it keeps elsewhere and a loader might write to.

    Raises ``BadInput`` for tensors of different widths in one storage and for tensors without dense memory.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor] | None = None) -> None:
        self._registered = frozenset(tensors)
        tensors = {**tensors, **(others or {})}
        self._tensors = tensors
        self._data = {name: t.data for name, t in tensors.items()}
        self._addresses = {name: (t.data_ptr(), t.numel()) for name, t in tensors.items()}
        self.numbers: dict[int, int] = {}
        names: list[list[str]] = []
        for name, tensor in tensors.items():
            if tensor.layout is not torch.strided or tensor.device.type == "meta":
                raise BadInput(f"engine tensor {name}: has no dense memory (layout {tensor.layout}, {tensor.device})")
            number = self.numbers.setdefault(storage_key(tensor), len(names))
            if number == len(names):
                names.append([])
            names[number].append(name)
        self.items = [_storage([(n, self._tensors[n]) for n in group]) for group in names]

    def restore(self) -> list[str]:
        """Puts back the memory of tensors that now have another one; returns their names."""
        moved = self.moved()
        for name in moved:
            self._tensors[name].data = self._data[name]
        return moved

    def moved(self) -> list[str]:
        """Names of tensors that no longer lie where they lay at the start."""
        return [name for name, t in self._tensors.items() if (t.data_ptr(), t.numel()) != self._addresses[name]]

    @contextmanager
    def replaced(self, copies: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Inside, tensors that lie in the storages of ``copies`` lie in those flat cells instead."""
        affected = [name for name, data in self._data.items() if self.numbers[storage_key(data)] in copies]
        try:
            for name in affected:
                data = self._data[name]
                flat = copies[self.numbers[storage_key(data)]].view(data.dtype)
                self._tensors[name].data = flat.as_strided(data.shape, data.stride(), data.storage_offset())
            yield
        finally:
            for name in affected:
                self._tensors[name].data = self._data[name]

    def check_in_place(self, current: Mapping[str, torch.Tensor], *, free: Container[str] = ()) -> None:
        """Raises ``StateMismatch`` naming a tensor of the engine whose memory moved, appeared or went away.

        Tensors named in ``free`` may do so.
        """
        for name, tensor in current.items():
            if name not in free and self._addresses.get(name) != (tensor.data_ptr(), tensor.numel()):
                raise StateMismatch(
                    f"engine tensor {name}: its storage moved after it was bound, so updates would not reach it; "
                    "bind the engine again, and find out what replaced the tensor"
                )
        gone = sorted(name for name in self._registered if name not in current and name not in free)
        if gone:
            raise StateMismatch(f"engine tensor {gone[0]}: is gone since the engine was bound; bind it again")


def _storage(group: Sequence[tuple[str, torch.Tensor]]) -> Storage:
    name, first = group[0]
    for other, tensor in group[1:]:
        if tensor.element_size() != first.element_size():
            raise BadInput(
                f"engine tensors {name} and {other} share a storage but not a width; such storage cannot be placed"
            )
    is_parameter = any(isinstance(t, torch.nn.Parameter) for _, t in group)
    return Storage(tuple(n for n, _ in group), flat_cells(first), is_parameter)


def flat_cells(tensor: torch.Tensor) -> torch.Tensor:
    """All memory of a tensor's storage, flat, as integers of the tensor's width."""
    plain = tensor.detach().as_subclass(torch.Tensor)
    elements = plain.untyped_storage().nbytes() // plain.element_size()
    return plain.as_strided((elements,), (1,), 0).view(_CELLS[plain.element_size()])


def module_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers under all their names; empty ones left out."""
    found: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    found.update(module.named_buffers(remove_duplicate=False))
    return {name: t for name, t in found.items() if t.numel()}


def attribute_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors kept as plain attributes of a module or of its parts."""
    found = {
        f"{prefix}.{key}" if prefix else key: value
        for prefix, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, torch.Tensor)
    }
    return {name: t for name, t in found.items() if t.numel() and t.device.type != "meta"}


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """The type in which a loader is given this tensor. Raises ``BadInput`` for one that torch does not have."""
    if spec.dtype not in _TORCH_DTYPES:
        raise BadInput(f"tensor {spec.name}: no loader can be given a tensor of dtype {spec.dtype}")
    return _TORCH_DTYPES[spec.dtype]


def canonical_tensor(spec: TensorSpec, cells: Cells) -> torch.Tensor:
    """A canonical tensor as a loader takes it, a copy in host memory; ``cells`` are all its cells, flat."""
    return device_cells(cells.copy(), torch.empty(0)).view(torch_dtype(spec)).reshape(spec.shape)


def host(cells: torch.Tensor) -> Cells:
    """Integer cells in host memory, as the unsigned array that the rest of the package computes with."""
    array: Any = cells.detach().cpu().numpy()
    return array.view(f"<u{cells.element_size()}")  # type: ignore[no-any-return]


def device_cells(cells: Cells, like: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`host`: cells on the device of ``like``."""
    width = cells.dtype.itemsize
    signed = cells.view(f"<i{width}" if width > 1 else "u1")
    return torch.from_numpy(signed).to(like.device)
