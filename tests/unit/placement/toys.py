"""Small engines with loaders of every kind, and canonical checkpoints for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch

from dcr_s3.delta import digest_range, tensor_key
from dcr_s3.format.cells import Cells
from dcr_s3.format.dtypes import DTYPES
from dcr_s3.format.run import TensorSpec
from dcr_s3.targets.storages import host

Weights = Iterable[tuple[str, torch.Tensor]]
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
Extents = Mapping[str, tuple[int, ...]]
State = dict[str, torch.Tensor]
NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3", torch.int64: "I64"}
_CELLS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Toy(torch.nn.Module):
    """An engine whose parameters are given by shape; subclasses say how weights get in.

    Parameters start with a bit pattern that no test writes, so that an element left out shows.
    """

    SHAPES: ClassVar[Shapes] = {}
    CANONICAL: ClassVar[Extents] = {}

    def __init__(self) -> None:
        super().__init__()
        for name, (shape, dtype) in self.SHAPES.items():
            tensor = torch.full(shape, 77, dtype=torch.int64).to(dtype)
            if dtype.is_floating_point:
                self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
            else:
                self.register_buffer(name, tensor)

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            self.place(name, tensor)

    def place(self, name: str, tensor: torch.Tensor) -> None:
        raise NotImplementedError


class Fused(Toy):
    """Three matrices side by side in one parameter, two halves of another, found by name."""

    SHAPES: ClassVar[Shapes] = {
        "qkv": ((14, 6), torch.bfloat16),
        "gate_up": ((8, 6), torch.bfloat16),
        "norm": ((6,), torch.bfloat16),
    }
    ROWS: ClassVar[Mapping[str, tuple[str, int, int]]] = {
        "q": ("qkv", 0, 8),
        "k": ("qkv", 8, 3),
        "v": ("qkv", 11, 3),
        "gate": ("gate_up", 0, 4),
        "up": ("gate_up", 4, 4),
    }
    CANONICAL: ClassVar[Extents] = {name: (rows, 6) for name, (_, _, rows) in ROWS.items()} | {"norm": (6,)}

    def place(self, name: str, tensor: torch.Tensor) -> None:
        if name == "norm":
            self.norm.data.copy_(tensor)
            return
        target, start, rows = self.ROWS[name]
        getattr(self, target).data.narrow(0, start, rows).copy_(tensor)


class Split(Toy):
    """One rank of two: rows of one matrix, columns of another, a chunk of a third; some tensors live elsewhere."""

    SHAPES: ClassVar[Shapes] = {
        "rows": ((4, 6), torch.bfloat16),
        "columns": ((8, 3), torch.bfloat16),
        "vector": ((5,), torch.float32),
    }
    CANONICAL: ClassVar[Extents] = {"rows": (8, 6), "columns": (8, 6), "vector": (5,), "elsewhere": (3, 3)}

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank

    def place(self, name: str, tensor: torch.Tensor) -> None:
        if name == "rows":
            tensor = tensor.narrow(0, 4 * self.rank, 4)
        elif name == "columns":
            tensor = tensor.chunk(2, dim=1)[self.rank]
        elif name == "elsewhere":
            return
        getattr(self, name).data.copy_(tensor)


class Transposed(Toy):
    """Stored transposed, once through a view and once through a fresh copy; experts stacked in one parameter."""

    SHAPES: ClassVar[Shapes] = {
        "view": ((5, 7), torch.bfloat16),
        "copy": ((5, 7), torch.bfloat16),
        "experts": ((2, 4, 3), torch.bfloat16),
        "folded": ((2, 3, 4), torch.bfloat16),
    }
    CANONICAL: ClassVar[Extents] = {
        "view": (7, 5),
        "copy": (7, 5),
        "experts.0": (3, 4),
        "experts.1": (3, 4),
        "folded": (6, 4),
    }

    def place(self, name: str, tensor: torch.Tensor) -> None:
        if name.startswith("experts"):
            self.experts.data[int(name[-1])].copy_(tensor.t())
        elif name == "folded":
            self.folded.data.copy_(tensor.view(2, 3, 4))
        else:
            source = tensor.t() if name == "view" else tensor.t().contiguous().to("cpu")
            getattr(self, name).data.copy_(source)


class Padded(Toy):
    """A vocabulary padded with zeros, and one scalar that is read as a number."""

    SHAPES: ClassVar[Shapes] = {"vocabulary": ((8, 3), torch.bfloat16), "scale": ((1,), torch.bfloat16)}
    CANONICAL: ClassVar[Extents] = {"vocabulary": (6, 3), "scale": (1,)}

    def place(self, name: str, tensor: torch.Tensor) -> None:
        if name == "scale":
            self.scale.data.fill_(tensor.item())
        else:
            self.vocabulary.data[:6].copy_(tensor)
            self.vocabulary.data[6:].fill_(0)


class Converting(Toy):
    """Casts, minus the exponential, a scaled and shifted column half."""

    SHAPES: ClassVar[Shapes] = {
        "cast": ((4, 5), torch.float32),
        "narrowed": ((4, 5), torch.bfloat16),
        "decay": ((9,), torch.float32),
        "halves": ((4, 6), torch.bfloat16),
        "small": ((4, 5), torch.float8_e4m3fn),
    }
    CANONICAL: ClassVar[Extents] = {
        "cast": (4, 5),
        "narrowed": (4, 5),
        "decay": (9,),
        "left": (4, 3),
        "right": (4, 3),
        "small": (4, 5),
    }
    WIDE = ("narrowed", "small")

    def place(self, name: str, tensor: torch.Tensor) -> None:
        if name == "decay":
            self.decay.data.copy_(-torch.exp(tensor.float()))
        elif name in ("left", "right"):
            half = self.halves.data.narrow(1, 0 if name == "left" else 3, 3)
            half.copy_(tensor.mul(2.0).add_(1.0))
        else:
            getattr(self, name).data.copy_(tensor)


class Buffering(Toy):
    """Waits for all three parts, joins them, copies the whole; another tensor is plain."""

    SHAPES: ClassVar[Shapes] = {"qkv": ((9, 4), torch.bfloat16), "plain": ((4,), torch.bfloat16)}
    CANONICAL: ClassVar[Extents] = {"q": (3, 4), "k": (3, 4), "v": (3, 4), "plain": (4,)}

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[str, torch.Tensor] = {}

    def place(self, name: str, tensor: torch.Tensor) -> None:
        if name == "plain":
            self.plain.data.copy_(tensor)
            return
        self.waiting[name] = tensor
        if len(self.waiting) == 3:
            self.qkv.data.copy_(torch.cat([self.waiting.pop(part) for part in "qkv"]))


class Tied(Toy):
    """One storage under two names, and a buffer that no checkpoint has."""

    SHAPES: ClassVar[Shapes] = {"embed": ((6, 4), torch.bfloat16), "counter": ((2,), torch.int64)}
    CANONICAL: ClassVar[Extents] = {"embed": (6, 4), "head": (6, 4)}

    def __init__(self) -> None:
        super().__init__()
        self.head = self.embed

    def place(self, name: str, tensor: torch.Tensor) -> None:
        getattr(self, name).data.copy_(tensor)


def random_state(toy: type[Toy], seed: int = 0) -> State:
    """A canonical checkpoint for a toy: any bits, NaNs and infinities among them."""
    rng = torch.Generator().manual_seed(seed)
    wide = getattr(toy, "WIDE", ())
    state = {}
    for name, shape in toy.CANONICAL.items():
        dtype = (
            torch.float32
            if name in wide or (name in toy.SHAPES and toy is Split and name == "vector")
            else torch.bfloat16
        )
        bits = torch.randint(-(1 << 15), 1 << 15, shape, generator=rng, dtype=torch.int32)
        cells = bits.to(torch.int16) if dtype == torch.bfloat16 else bits << 16
        state[name] = cells.view(dtype)
    return state


def changed(state: State, seed: int, share: float = 0.2) -> State:
    """The state with some bits of some elements of every tensor flipped."""
    rng = torch.Generator().manual_seed(seed)
    result = {}
    for name, tensor in state.items():
        cells = tensor.clone().view(_CELLS[tensor.element_size()])
        mask = torch.rand(tensor.shape, generator=rng) < share
        mask.view(-1)[int(torch.randint(0, mask.numel(), (1,), generator=rng))] = True
        flips = torch.randint(1, 1 << 7, tensor.shape, generator=rng).to(cells.dtype) << (
            0 if cells.element_size() < 4 else 16
        )
        result[name] = torch.where(mask, cells ^ flips, cells).view(tensor.dtype)
    return result


def cells_of(tensor: torch.Tensor) -> Cells:
    """A tensor's bits, flat."""
    return host(tensor.contiguous().reshape(-1).view(_CELLS[tensor.element_size()]))


def specs_of(state: State) -> list[TensorSpec]:
    """The run's table for a state."""
    result = []
    for name, tensor in state.items():
        dtype = DTYPES[NAMES[tensor.dtype]]
        digest = digest_range(tensor_key(name, dtype, tuple(tensor.shape)), 0, cells_of(tensor))
        result.append(TensorSpec(name=name, dtype=dtype.name, shape=tuple(tensor.shape), digest=digest.hex()))
    return result


def bits(module: torch.nn.Module) -> dict[str, bytes]:
    """Every parameter and buffer, bit for bit."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: cells_of(t.data).tobytes() for name, t in tensors.items()}
