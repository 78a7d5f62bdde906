"""One rank of an engine that keeps no mirror: old bits are read from the engine's own memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dcr_s3.delta import decode_block, digest_at, digest_range
from dcr_s3.delta.account import account, totals
from dcr_s3.errors import BadInput, CorruptObject, WrongBase
from dcr_s3.format.cells import Cells
from dcr_s3.format.codings import Coding
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.region import Region, split_positions
from dcr_s3.format.run import TensorSpec
from dcr_s3.format.segment import BlockEntry
from dcr_s3.targets.checkpoint import Checkpoint, describe, match_checkpoint
from dcr_s3.targets.engine.bound import BoundEngine, Engine, Update
from dcr_s3.targets.engine.changes import Changed, join_parts
from dcr_s3.targets.engine.holding import Duty, Held
from dcr_s3.targets.placement import Block, Indices, Route
from dcr_s3.targets.residence import block_cells, block_digest

_CACHED_CELLS = 1 << 28


@dataclass
class Draft:
    """What a rank has decoded of one version. ``deltas``: by tensor, what its duty adds to the state digest."""

    parts: dict[int, list[Changed]] = field(default_factory=dict)
    deltas: dict[int, StateDigest] = field(default_factory=lambda: defaultdict(StateDigest))
    changed_elements: int = 0

    def take(self, numbers: Iterable[int]) -> dict[int, Changed]:
        """Removes and returns the changes of some tensors."""
        return {n: join_parts(self.parts.pop(n)) for n in list(numbers) if n in self.parts}


class RankEngine:
    """An engine's rank, bound to a run, and its share of the group's proof.

    ``base`` is the checkpoint that the engine was loaded from. Tensors whose bits the engine does not show are kept in
    host memory. Raises as :class:`BoundEngine`.
    """

    def __init__(
        self, engine: Engine, specs: Sequence[TensorSpec], base: Checkpoint, *, unwritten: Iterable[str] = ()
    ) -> None:
        self._base = [copies[0] for copies in match_checkpoint(base, specs)]
        self.bound = BoundEngine(engine, specs, self._base.__getitem__, unwritten=unwritten)
        self.kept: dict[int, Cells] = {}
        self.regions: list[Region] = []
        self._blocks: list[Block | None] = []
        for number, plan in enumerate(self.bound.placement.plans):
            if plan.route is Route.PLANNED:
                self._blocks += plan.blocks
                self.regions += [b.region for b in plan.blocks]
            elif plan.route is not Route.SKIPPED:
                self._keep(number)
        self._counted: dict[int, list[int]] = {}
        self._held = Held(specs, self.regions)
        self._whole: dict[int, Cells] = {}

    def assign(self, duty: Duty) -> None:
        """Takes over a share of the group's proof. Afterwards the base is not needed any more."""
        for number in duty.kept:
            if number not in self.kept:
                self._keep(number)
        counted = set(duty.counted)
        self._counted = {}
        for index, region in enumerate(self.regions):
            if index in counted or (self._blocks[index] is None and region.tensor in duty.kept):
                self._counted.setdefault(region.tensor, []).append(index)
        self._held = Held(self.bound.specs, self.regions)
        self._base = []

    def digests(self) -> dict[int, StateDigest]:
        """Per tensor, the digest of what this rank counts, read from where it is held.

        Raises ``StateMismatch`` naming a tensor of the engine that lies elsewhere now.
        """
        self.bound.check_in_place()
        return {
            number: sum((self._region_digest(i) for i in indices), StateDigest())
            for number, indices in self._counted.items()
        }

    def needs(self, block: BlockEntry) -> bool:
        """False if nothing of a block is held here."""
        return any(self._held.touches(region) for region in block.regions)

    def holds_of(self, number: int) -> bool:
        """True where anything of a tensor is held here."""
        return self._held.touches(Region.run(number, 0, self.bound.specs[number].cells))

    def check(self, block: BlockEntry, where: str) -> None:
        """Raises ``CorruptObject`` for a block that does not fit the run, ``BadInput`` for one that this rank cannot
        decode.
        """
        specs = self.bound.specs
        for region in block.regions:
            if region.tensor >= len(specs) or specs[region.tensor].type != block.dtype:
                raise CorruptObject(f"{where}: a block names tensor {region.tensor}, which is none of the run's")
            try:
                region.check(specs[region.tensor].cells)
            except ValueError as error:
                raise CorruptObject(f"{where}: tensor {specs[region.tensor].name}: {error}") from None
        if block.coding is Coding.CLOCK_CONTEXT and self.needs(block) and not self._holds(block):
            raise BadInput(
                f"{where}: {self._names(block)}: this rank holds only a part, but the run's deltas cannot be read "
                "without all old bits; create the run with --context-free"
            )

    def decode(self, block: BlockEntry, payload: bytes, draft: Draft, where: str) -> None:
        """Adds a block's changes to ``draft``. Raises ``WrongBase`` if the bits held are not those it was made from."""
        old = [self._gather(region) for region in block.regions]
        holds = self._holds(block)
        try:
            changes = decode_block(block.dtype, block.coding, payload, block.changed, old, partial=not holds)
        except CorruptObject as error:
            raise WrongBase(
                f"{where}: {self._names(block)} cannot be decoded ({error}); load the engine anew"
            ) from None
        if holds and totals(account(block.regions, changes, self.bound.keys)) != (block.old, block.new):
            raise WrongBase(
                f"{where}: {self._names(block)}: the engine does not hold the bits that the delta was made from; "
                "something else wrote to it. Load it anew"
            )
        for region, span, first in split_positions(block.regions, changes.positions):
            index = region.canonical(changes.positions[span] - np.uint32(first)).astype(np.int64)
            order = np.argsort(index, kind="stable") if index.size > 1 and (np.diff(index) < 0).any() else None
            old_cells, new_cells = changes.old[span], changes.new[span]
            if order is not None:
                index, old_cells, new_cells = index[order], old_cells[order], new_cells[order]
            draft.parts.setdefault(region.tensor, []).append(Changed(index, new_cells, old_cells))
            draft.deltas[region.tensor] += self._counted_delta(region.tensor, index, old_cells, new_cells)
        draft.changed_elements += block.changed

    def replace(self, number: int, cells: Cells, draft: Draft) -> None:
        """Adds what separates the tensor that is held from ``cells``, all its new ones, to ``draft``."""
        blocks = self.bound.placement.plans[number].blocks
        old = self.kept[number] if number in self.kept else self._assemble(blocks, cells.copy())
        positions = np.flatnonzero(old != cells).astype(np.int64)
        if positions.size:
            new, before = cells[positions], old[positions]
            draft.parts.setdefault(number, []).append(Changed(positions, new, before))
            draft.deltas[number] += self._counted_delta(number, positions, before, new)
            draft.changed_elements += positions.size

    def stage(self, draft: Draft, *, last: bool) -> Update:
        """Writes for what ``draft`` has of planned tensors; with ``last``, also of all others."""
        plans = self.bound.placement.plans
        ready = draft.take(n for n in list(draft.parts) if last or plans[n].route is Route.PLANNED)
        held = {n: c for n, c in ready.items() if plans[n].route is Route.PLANNED or n in self.kept}
        update = self.bound.stage(held, self.kept.__getitem__)
        update.kept = {n: (c, self.kept[n][c.positions]) for n, c in held.items() if n in self.kept}
        self._whole.clear()
        return update

    def keep(self, update: Update) -> None:
        """Makes the changes of written tensors in host memory too."""
        for number, (changed, _) in update.kept.items():
            self.kept[number][changed.positions] = changed.values

    def forget(self, update: Update) -> None:
        """Undoes :meth:`keep`."""
        for number, (changed, old) in update.kept.items():
            self.kept[number][changed.positions] = old

    def _keep(self, number: int) -> None:
        self.kept[number] = self._base[number].copy()
        self.regions.append(Region.run(number, 0, self._base[number].size))
        self._blocks.append(None)

    def _holds(self, block: BlockEntry) -> bool:
        return all(self._held.whole(region.tensor) for region in block.regions)

    def _gather(self, region: Region) -> Cells:
        number = region.tensor
        if number in self.kept:
            return region.gather(self.kept[number])
        blocks = self.bound.placement.plans[number].blocks
        if len(blocks) == 1 and blocks[0].region.is_run and region.is_run and self._held.whole(number):
            storage = self.bound.storages.items[blocks[0].storage]
            if storage.cells.device.type == "cpu" and blocks[0].strides == (1,):
                return region.gather(block_cells(self.bound.storages, blocks[0]))
        if number not in self._whole:
            if sum(c.size for c in self._whole.values()) > _CACHED_CELLS:
                self._whole.clear()
            spec = self.bound.specs[number]
            self._whole[number] = self._assemble(blocks, np.zeros(spec.cells, f"<u{spec.type.cell_bytes}"))
        return region.gather(self._whole[number])

    def _assemble(self, blocks: Sequence[Block], whole: Cells) -> Cells:
        """``whole``, all cells of a tensor, with those that are held here written over it."""
        for block in blocks:
            region = block.region
            strides = tuple(s * whole.itemsize for s in region.strides)
            view = np.lib.stride_tricks.as_strided(whole[region.start :], region.shape, strides)
            view[...] = block_cells(self.bound.storages, block).reshape(region.shape)
        return whole

    def _counted_delta(self, number: int, index: Indices, old: Cells, new: Cells) -> StateDigest:
        result = StateDigest()
        key = self.bound.keys[number]
        for region_number in self._counted.get(number, ()):
            block = self._blocks[region_number]
            chosen = block.held(index)[0] if block is not None else slice(None)
            places = index[chosen].astype(np.uint64)
            result += digest_at(key, places, new[chosen]) - digest_at(key, places, old[chosen])
        return result

    def _region_digest(self, index: int) -> StateDigest:
        block, number = self._blocks[index], self.regions[index].tensor
        if block is not None:
            return block_digest(self.bound.storages, self.bound.keys[number], block)
        return digest_range(self.bound.keys[number], 0, self.kept[number])

    def _names(self, block: BlockEntry) -> str:
        return describe([self.bound.specs[r.tensor].name for r in block.regions])
