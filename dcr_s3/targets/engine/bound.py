"""An engine bound to a run: every canonical tensor has a route into it that was proved before anything is written."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch

from dcr_s3.delta import tensor_key
from dcr_s3.errors import BadInput, StateMismatch
from dcr_s3.format.cells import Cells
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.run import TensorSpec
from dcr_s3.targets.checkpoint import describe
from dcr_s3.targets.engine.changes import Changed
from dcr_s3.targets.engine.intercept import Caught, catch, find, shadowed
from dcr_s3.targets.engine.scatter import Part, Scatter, make_scatters
from dcr_s3.targets.placement import Block, Route
from dcr_s3.targets.placement_bind import bind_loader, move_to_dense
from dcr_s3.targets.placement_trace import LoadWeights
from dcr_s3.targets.residence import block_cells, tensor_digest
from dcr_s3.targets.storages import Storages, canonical_tensor

log = logging.getLogger(__name__)

Canonical = Callable[[int], Cells]
"""Flat cells of a canonical tensor, by its number."""

_CATCH_BYTES = 256 << 20


def nothing_more(names: Iterable[str]) -> None:
    """For engines that do nothing to weights after loading them."""


@dataclass(frozen=True)
class Engine:
    """What is needed of an engine: its loader, its tensors by name as they are now, tensors kept as plain attributes.

    ``after_loading`` is what it does to tensors of some names once they are loaded; ``companions`` names the tensors
    that this treats together with a given one.
    """

    load_weights: LoadWeights
    tensors: Callable[[], dict[str, torch.Tensor]]
    attributes: Callable[[], dict[str, torch.Tensor]] = dict
    after_loading: Callable[[Iterable[str]], None] = nothing_more
    companions: Callable[[str], Iterable[str]] = lambda name: (name,)


@dataclass
class Update:
    """All that one version changes in the engine, ready to be written."""

    scatters: list[Scatter] = field(default_factory=list)
    groups: list[tuple[int, ...]] = field(default_factory=list)
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    """Whole canonical tensors of the groups."""
    saved: dict[int, torch.Tensor] = field(default_factory=dict)
    """Cells of storages as they were before groups were loaded."""
    kept: dict[int, tuple[Changed, Cells]] = field(default_factory=dict)
    """Changes, and the cells they replace, of canonical tensors that are kept beside the engine."""

    @property
    def changed_elements(self) -> int:
        return sum(s.size for s in self.scatters)


class BoundEngine:
    """Stages and writes versions; does not decide when. Not for use from several threads.

    ``canonical`` gives the bits that the engine was loaded from. ``unwritten`` names engine parameters that the run
    does not fill. Raises ``BadInput`` for what the loader refuses or what cannot be proved, naming the tensor.
    """

    def __init__(
        self, engine: Engine, specs: Sequence[TensorSpec], canonical: Canonical, *, unwritten: Iterable[str] = ()
    ) -> None:
        self.engine = engine
        self.specs = tuple(specs)
        self.keys = [tensor_key(s.name, s.type, s.shape) for s in specs]
        self.storages = Storages(engine.tensors(), engine.attributes())
        self.placement = bind_loader(engine.load_weights, self.storages, specs, unwritten=unwritten)
        self.check_in_place()
        self._prove(canonical)
        for number, plan in enumerate(self.placement.plans):
            if plan.route is not Route.PLANNED:
                log.info("tensor %s: %s, %s", specs[number].name, plan.route.value, plan.reason)

    def check_in_place(self) -> None:
        """Raises ``StateMismatch`` if memory of the engine that the loader fills moved since it was bound."""
        self.storages.check_in_place(self.engine.tensors(), free=frozenset(self.placement.fixed))

    def stage(self, changes: Mapping[int, Changed], canonical: Canonical) -> Update:
        """Prepares the writes for ``changes`` by tensor number, against ``canonical``, the bits of the version held.

        Of planned tensors whose changes bring their old bits, ``canonical`` is not asked. Writes nothing. Raises
        ``StateMismatch`` naming a tensor that does not hold these bits where it is to change.
        """
        update = Update()
        parts: dict[int, list[Part]] = {}
        for number, changed in changes.items():
            if self.placement.plans[number].route is Route.PLANNED:
                for block in self.placement.plans[number].blocks:
                    self._stage_block(block, changed, canonical, parts)
        for numbers in self._chunks(n for n in changes if self.placement.plans[n].route is Route.LOADER):
            caught = self._catch(numbers, lambda n: changes[n].over(canonical(n)))
            for number in numbers:
                for block in self.placement.plans[number].blocks:
                    _, coordinates = block.held(changes[number].positions)
                    places = block.places(coordinates)
                    values = find(caught, block, self.specs[number].name).at(places)
                    parts.setdefault(block.storage, []).append(Part(self.specs[number].name, places, values))
        self._check_complete(changes, parts)
        update.scatters = list(make_scatters(self.storages.items, parts))
        for group in self.placement.groups():
            if any(n in changes for n in group):
                update.groups.append(group)
                for n in group:
                    cells = changes[n].over(canonical(n)) if n in changes else canonical(n)
                    update.tensors[n] = canonical_tensor(self.specs[n], cells)
        return update

    def write(self, update: Update, check: Callable[[], None]) -> None:
        """Writes an update; ``check`` is called between steps and may raise. What was written can be undone."""
        for scatter in update.scatters:
            check()
            scatter.write()
        for group in update.groups:
            check()
            storages = self.placement.group_storages(group)
            update.saved.update({n: self.storages.items[n].cells.clone() for n in storages if n not in update.saved})
            self._load(group, update.tensors.__getitem__)

    def undo(self, update: Update) -> None:
        """Puts back every cell that :meth:`write` may have changed."""
        for number, cells in update.saved.items():
            self.storages.items[number].cells.copy_(cells)
        for scatter in update.scatters:
            scatter.undo()

    def check_written(self, update: Update) -> None:
        """Reads the written elements back. Raises ``StateMismatch`` naming a tensor that does not hold them."""
        for scatter in update.scatters:
            scatter.check()

    def digests(self) -> Iterator[tuple[int, StateDigest]]:
        """Digest of what the engine holds of every planned tensor, read through the placement."""
        for number in self.placement.by_route(Route.PLANNED):
            yield number, tensor_digest(self.storages, self.keys[number], self.placement.plans[number].blocks)

    def check_converted(self, canonical: Canonical) -> None:
        """Raises ``StateMismatch`` naming a tensor on another route whose place does not hold what the loader makes of
        its canonical bits. Groups are loaded into a copy of their memory, for which the engine must not run.
        """
        wrong = self._wrong_conversions(canonical)
        if wrong:
            raise StateMismatch(f"{self._names(wrong)}: the engine does not hold what its loader makes of them")
        for group in self.placement.groups():
            if not self._group_is_right(group, canonical):
                raise StateMismatch(f"{self._names(group)}: the engine does not hold what its loader makes of them")

    def _prove(self, canonical: Canonical) -> None:
        wrong = [n for n in self.placement.by_route(Route.PLANNED) if not self._same_bits(n, canonical)]
        wrong += self._wrong_conversions(canonical)
        self.placement = move_to_dense(self.placement, wrong, self._companions)
        for group in self.placement.groups():
            if not self._group_is_right(group, canonical):
                raise BadInput(
                    f"{self._names(group)}: the engine does not hold what its loader makes of the run's weights "
                    f"({self.placement.plans[group[0]].reason}), so it cannot be updated; was it loaded from this run?"
                )

    def _companions(self, storage: int) -> set[int]:
        names = {other for name in self.storages.items[storage].names for other in self.engine.companions(name)}
        return {number for number, item in enumerate(self.storages.items) if names & set(item.names)}

    def _same_bits(self, number: int, canonical: Canonical) -> bool:
        cells = canonical(number)
        blocks = self.placement.plans[number].blocks
        return all(np.array_equal(block_cells(self.storages, b), b.region.gather(cells)) for b in blocks)

    def _wrong_conversions(self, canonical: Canonical) -> list[int]:
        wrong = []
        for numbers in self._chunks(self.placement.by_route(Route.LOADER)):
            caught = self._catch(numbers, canonical)
            for number in numbers:
                for block in self.placement.plans[number].blocks:
                    made = find(caught, block, self.specs[number].name).cells
                    made = made.as_strided(block.region.shape, block.strides, 0)
                    held = self.storages.items[block.storage].view(block.start, block.region.shape, block.strides)
                    if not torch.equal(made, held):
                        wrong.append(number)
                        break
        return wrong

    def _group_is_right(self, group: Sequence[int], canonical: Canonical) -> bool:
        with shadowed(self.storages, self.placement.group_storages(group)) as copies:
            self._load(group, lambda n: canonical_tensor(self.specs[n], canonical(n)))
        return all(torch.equal(cells, self.storages.items[n].cells) for n, cells in copies.items())

    def _load(self, group: Sequence[int], tensor: Callable[[int], torch.Tensor]) -> None:
        with torch.no_grad():
            self.engine.load_weights((self.specs[n].name, tensor(n)) for n in group)
            names = [n for s in self.placement.group_storages(group) for n in self.storages.items[s].names]
            self.engine.after_loading(names)

    def _catch(self, numbers: Sequence[int], cells: Canonical) -> list[Caught]:
        weights = ((self.specs[n].name, canonical_tensor(self.specs[n], cells(n))) for n in numbers)
        return catch(self.engine.load_weights, self.storages, weights)

    def _chunks(self, numbers: Iterable[int]) -> Iterator[list[int]]:
        """Groups of tensors small enough to be held twice."""
        chunk: list[int] = []
        size = 0
        for number in numbers:
            if chunk and size + self.specs[number].size_bytes > _CATCH_BYTES:
                yield chunk
                chunk, size = [], 0
            chunk.append(number)
            size += self.specs[number].size_bytes
        if chunk:
            yield chunk

    def _stage_block(self, block: Block, changed: Changed, canonical: Canonical, parts: dict[int, list[Part]]) -> None:
        chosen, coordinates = block.held(changed.positions)
        if not coordinates[0].size:
            return
        number = block.region.tensor
        old = changed.old[chosen] if changed.old is not None else canonical(number)[changed.positions[chosen]]
        part = Part(self.specs[number].name, block.places(coordinates), changed.values[chosen], old)
        parts.setdefault(block.storage, []).append(part)

    def _check_complete(self, changes: Mapping[int, Changed], parts: Mapping[int, Sequence[Part]]) -> None:
        """Every change of a tensor that is held entirely has a place."""
        placed = Counter[str]()
        for part in chain.from_iterable(parts.values()):
            placed[part.name] += part.places.size
        for number in self.placement.by_route(Route.PLANNED, Route.LOADER):
            if number in changes and self.placement.holds(number):
                name, wanted = self.specs[number].name, changes[number].positions.size
                if placed[name] != wanted:
                    raise StateMismatch(
                        f"tensor {name}: {placed[name]:,} of its {wanted:,} changes have a place in the engine; bind "
                        "the engine again"
                    )

    def _names(self, numbers: Sequence[int]) -> str:
        return describe([self.specs[n].name for n in numbers])
