"""Follows an engine's own loader while it places weights that have a shape but no content.

Every canonical tensor is handed to the loader as a meta tensor. Views keep its storage, so the loader's last copy tells
which canonical cells go to which engine elements; copies and element-wise operations on the way are followed. Nothing
is ever written to engine memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dcr_s3.errors import BadInput
from dcr_s3.format.region import Region
from dcr_s3.format.run import TensorSpec
from dcr_s3.targets.placement import Block
from dcr_s3.targets.storages import Storages, storage_key, torch_dtype

aten = torch.ops.aten
LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""An engine's loader, called as ``load_weights((name, tensor) pairs)``."""

Place = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""(storage, start, shape, strides): elements of an engine storage."""

_COPIES = {aten.clone.default, aten._to_copy.default}
_SCALAR = -1.2345678901234567e-289


@dataclass(frozen=True)
class Origin:
    """Where the cells of a tensor that the loader has in hand come from.

    ``tensors``: all canonical tensors it depends on. ``number`` is None unless each cell is a function of one cell of
    that tensor; then element ``i`` of a dense tensor of ``shape`` with ``own`` strides comes from canonical cell
    ``start + sum(i[d] * strides[d])``. ``exact``: with the same bits.
    """

    tensors: frozenset[int]
    number: int | None = None
    exact: bool = False
    width: int = 0
    shape: tuple[int, ...] = ()
    own: tuple[int, ...] = ()
    start: int = 0
    strides: tuple[int, ...] = ()

    def through(self, view: torch.Tensor) -> tuple[int, tuple[int, ...]] | None:
        """Canonical start and strides of a view of the tensor; None where no strides say it."""
        if self.number is None or view.element_size() != self.width:
            return None
        offset, canonical, first = int(view.storage_offset()), self.start, [0] * len(self.shape)
        order = sorted((d for d in range(len(self.shape)) if self.shape[d] > 1), key=lambda d: -self.own[d])
        for dim in order:
            first[dim], offset = divmod(offset, self.own[dim])
            canonical += first[dim] * self.strides[dim]
        last, strides = list(first), []
        for extent, stride in zip(view.shape, view.stride(), strict=True):
            if extent == 1 or stride == 0:
                strides.append(0)
                continue
            found = next((d for d in order if self.own[d] <= stride and stride % self.own[d] == 0), None)
            if found is None:
                return None
            last[found] += stride // self.own[found] * (extent - 1)
            strides.append(stride // self.own[found] * self.strides[found])
        if offset or any(index >= extent for index, extent in zip(last, self.shape, strict=True)):
            return self._along(view)
        return canonical, tuple(strides)

    def _along(self, view: torch.Tensor) -> tuple[int, tuple[int, ...]] | None:
        """As above where dims were joined, which keeps the sense only if memory order is canonical order."""
        if self.own != self.strides:
            return None
        return self.start + int(view.storage_offset()), tuple(view.stride())


@dataclass(frozen=True)
class Write:
    """One write to engine storage.

    ``block`` is None for a constant, such as padding; ``exact`` says that bits are kept.
    """

    place: Place
    block: Block | None = None
    exact: bool = False


@dataclass
class Trace:
    """What a loader did to engine storage."""

    writes: list[Write] = field(default_factory=list)
    """In the order of writing."""
    opaque: list[tuple[frozenset[int], int, str]] = field(default_factory=list)
    """(tensors, storage, operation) of writes that no strides describe."""


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercepts what a loader does to engine storage and to the tensors it was given."""

    def __init__(self, storages: Storages, specs: Sequence[TensorSpec]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.current = 0
        self._storages = storages
        self._specs = specs
        self._origins: dict[int, Origin] = {}
        self._alive: list[torch.Tensor] = []
        self._reads: list[Origin] = []  # tensors read as numbers that may turn up in anything that follows

    def source(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, on the meta device, as what stands for canonical tensor ``number``."""
        strides = tuple(tensor.stride())
        origin = Origin(
            frozenset((number,)), number, True, tensor.element_size(), tuple(tensor.shape), strides, 0, strides
        )
        self._track(tensor, origin)
        self.current = number
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = _tensors(args) + _tensors(kwargs.values())
        written = written_tensors(func, args, kwargs)
        for tensor in written:
            if storage_key(tensor) in self._storages.numbers:
                self._note_write(func, args, tensor, given)
                return args[0] if args else tensor
        tracked = [t for t in given if storage_key(t) in self._origins]
        if not tracked:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            self._reads.append(self._origins[storage_key(tracked[0])])
            return _SCALAR if tracked[0].dtype.is_floating_point else 1
        args, kwargs = tree_map(_to_meta, (args, kwargs))
        kwargs.pop("device", None)
        result = func(*args, **kwargs)
        self._follow(func, given, tracked, written, result)
        return result

    def _follow(
        self,
        func: Any,
        given: list[torch.Tensor],
        tracked: list[torch.Tensor],
        written: list[torch.Tensor],
        result: Any,
    ) -> None:
        origin = self._derive(func, given, tracked)
        for tensor in written:
            known = self._origins.get(storage_key(tensor))
            if known is not None and torch.Tag.pointwise in func.tags and len({id(t) for t in tracked}) == 1:
                self._track(tensor, replace(known, exact=False))
            else:
                self._track(tensor, Origin(origin.tensors | (known.tensors if known else frozenset())))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and storage_key(tensor) not in self._origins:
                exact = origin.exact and tensor.dtype == tracked[0].dtype
                shape, own = tuple(tensor.shape), tuple(tensor.stride())
                self._track(tensor, replace(origin, exact=exact, width=tensor.element_size(), shape=shape, own=own))

    def _derive(self, func: Any, given: list[torch.Tensor], tracked: list[torch.Tensor]) -> Origin:
        """Origin of a fresh result, its own layout left open."""
        tensors = frozenset().union(*(self._origins[storage_key(t)].tensors for t in tracked))
        copied = func in _COPIES
        if not copied and torch.Tag.pointwise not in func.tags:
            return Origin(tensors)
        source = tracked[0]
        from_engine = any(storage_key(t) in self._storages.numbers for t in given)
        widest = torch.broadcast_shapes(*(t.shape for t in given))  # type: ignore[no-untyped-call]
        if len({id(t) for t in tracked}) != 1 or from_engine or source.shape != widest:
            return Origin(tensors)
        if self._reads and not copied:
            return Origin(tensors.union(*(o.tensors for o in self._reads)))
        known = self._origins[storage_key(source)]
        place = known.through(source)
        if place is None:
            return Origin(tensors)
        return Origin(tensors, known.number, known.exact and copied, 0, (), (), *place)

    def _note_write(self, func: Any, args: tuple[Any, ...], target: torch.Tensor, given: list[torch.Tensor]) -> None:
        storage = self._storages.numbers[storage_key(target)]
        place = (storage, int(target.storage_offset()), tuple(target.shape), tuple(target.stride()))
        sources = [self._origins[storage_key(t)] for t in given if storage_key(t) in self._origins]
        reads_engine = any(t is not target and storage_key(t) in self._storages.numbers for t in given)
        if func in (aten.fill_.Scalar, aten.zero_.default):
            self._note_fill(target, place, args[1] if len(args) > 1 else 0)
            return
        if not sources and not reads_engine and func is aten.copy_.default:
            self.trace.writes.append(Write(place))
            return
        block = self._block(args[1], target, storage) if func is aten.copy_.default and sources else None
        if block is not None:
            origin = self._origins[storage_key(args[1])]
            self.trace.writes.append(Write(place, block, origin.exact and args[1].dtype == target.dtype))
            return
        tensors = frozenset().union(*(o.tensors for o in sources)) or frozenset((self.current,))
        self.trace.opaque.append((tensors, storage, str(func)))

    def _note_fill(self, target: torch.Tensor, place: Place, value: object) -> None:
        if not self._reads or value == 0:
            self.trace.writes.append(Write(place))
            return
        origin = self._reads[-1]
        if value in (_SCALAR, 1) and target.numel() == 1 and self._specs[origin.number or 0].cells == 1:
            self._reads.pop()
            block = Block(Region.run(origin.number or 0, 0, 1), place[0], place[1], (1,))
            self.trace.writes.append(Write(place, block))
            return
        tensors = frozenset().union(*(o.tensors for o in self._reads))
        self.trace.opaque.append((tensors, place[0], "fill_ with a number read from it"))

    def _block(self, source: torch.Tensor, target: torch.Tensor, storage: int) -> Block | None:
        origin = self._origins.get(storage_key(source))
        place = origin.through(source) if origin is not None else None
        if origin is None or origin.number is None or place is None or source.numel() != target.numel():
            return None
        if source.shape != target.shape or any(
            s == 0 and n > 1 for n, s in zip(source.shape, source.stride(), strict=True)
        ):
            return None
        start, strides = place
        if not target.numel():
            return None
        shape = tuple(target.shape) or (1,)
        region = Region(origin.number, start, shape, strides or (1,))
        return Block.of(region, storage, int(target.storage_offset()), tuple(target.stride()) or (1,))

    def _track(self, tensor: torch.Tensor, origin: Origin) -> None:
        self._alive.append(tensor)  # a storage's key means nothing once the storage is gone
        self._origins[storage_key(tensor)] = origin


def trace_loader(load_weights: LoadWeights, storages: Storages, specs: Sequence[TensorSpec]) -> Trace:
    """Lets the loader place every canonical tensor once, in the order of ``specs``.

    Raises ``BadInput`` naming the tensor at which the loader failed, or the engine tensor whose storage it replaced.
    """
    tracer = Tracer(storages, specs)
    sources = [torch.empty(spec.shape, dtype=torch_dtype(spec), device="meta") for spec in specs]
    at = ""

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal at
        for number, spec in enumerate(specs):
            at = spec.name
            yield spec.name, tracer.source(number, sources[number])

    try:
        with torch.no_grad(), tracer:
            load_weights(weights())
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(
            f"tensor {at}: the engine's loader does not take it ({type(error).__name__}: {error})"
        ) from error
    finally:
        moved = storages.restore()
    if moved:
        raise BadInput(f"engine tensor {moved[0]}: the loader replaces its storage, so it cannot be updated in place")
    return tracer.trace


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Tensors that an operation writes to."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    named = [s for s in schema.arguments if s.name in kwargs] if kwargs else []
    given = [*zip(args, schema.arguments, strict=False), *((kwargs[s.name], s) for s in named)]
    return _tensors(a for a, s in given if s.alias_info is not None and s.alias_info.is_write)


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Tensors among values and in the lists among them, as operations take them."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += (item for item in value if isinstance(item, torch.Tensor))
    return found


def _to_meta(value: Any) -> Any:
    """Constants of the loader, moved to where content does not matter."""
    if isinstance(value, torch.Tensor) and value.device.type != "meta":
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value
