"""Opens a run for several owners: the run, each owner's share of the baseline, one fence."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

from dcr_s3.delta import tensor_key
from dcr_s3.errors import BadInput, PreconditionFailed, RunExists, RunMissing
from dcr_s3.format.cells import Cells
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.keys import MANIFEST_PREFIX, RUN_KEY, manifest_version
from dcr_s3.format.region import Region
from dcr_s3.format.run import Run, TensorSpec
from dcr_s3.format.signature import Signer, Verifier
from dcr_s3.mapping.group import Group
from dcr_s3.mapping.ownership import Piece
from dcr_s3.mapping.part import Shard
from dcr_s3.mapping.read import Reader
from dcr_s3.mirroring import open_mirror
from dcr_s3.protocol.position import Position
from dcr_s3.reading import load_run, read_position
from dcr_s3.replay import Replay
from dcr_s3.sender import Sender
from dcr_s3.sending.baseline import default_state_dir
from dcr_s3.sending.create import create_run, read_base
from dcr_s3.sending.owners import Owners
from dcr_s3.store import Store, open_store
from dcr_s3.store.metered import MeteredStore
from dcr_s3.targets.checkpoint import Checkpoint, match_checkpoint
from dcr_s3.targets.mirror import total
from dcr_s3.targets.shard import ShardMirror, measure_pieces
from dcr_s3.training.plan import Plan, by_key, make_plan
from dcr_s3.workers import Progress, make_executor, no_progress
from dcr_s3.world import timestamp, world

Pieces = dict[Region, Cells]


@dataclass(frozen=True)
class Settings:
    """What ``Publisher.open`` was given."""

    base: Path | None
    state_dir: Path | None
    baseline_dir: Path | None
    fence: bool
    context: bool
    timeout_s: float
    signer: Signer | None
    verifier: Verifier | None
    workers: int | None
    progress: Progress | None


def join(
    url: str | Store, shards: Sequence[Shard], group: Group, settings: Settings, stack: ExitStack
) -> tuple[Sender, Plan]:
    """Collective. Opens or creates the run; this rank becomes one of its owners. ``stack`` closes things."""
    store = MeteredStore(open_store(url, signer=settings.signer, verifier=settings.verifier))
    if isinstance(url, str):
        stack.callback(store.close)
    with make_executor(settings.workers, "open") as executor:
        joiner = Joiner(store, shards, group, settings, executor)
        baseline = joiner.baseline()
    session = group.from_first(world().token(6))
    owners = Owners(store, group.rank, group.size, timeout_s=settings.timeout_s)

    def share(fence: bool) -> Sender:
        return Sender.share(
            store, joiner.run, joiner.start, baseline, owners, session,
            fence=fence, workers=settings.workers, progress=settings.progress,
        )  # fmt: skip

    first = group.together(lambda: share(settings.fence) if group.rank == 0 else None)
    position = group.from_first(first.position.model_dump(mode="json") if first is not None else None)
    baseline.position = Position.model_validate(position)
    return first if first is not None else share(False), joiner.plan


class Joiner:
    """One opening. All methods are collectives."""

    def __init__(
        self, store: Store, shards: Sequence[Shard], group: Group, settings: Settings, executor: Executor
    ) -> None:
        self.store = store
        self._group = group
        self._settings = settings
        self._executor = executor
        self._progress = settings.progress or no_progress
        self._reader = Reader(by_key(shards))
        if group.from_first_of(self._prepare):
            self.run, self.start = group.together(lambda: load_run(store))
            self.plan = make_plan(shards, self.run, group)
        else:
            self.plan = make_plan(shards, None, group)
            self._create()
            self.run, self.start = group.together(lambda: load_run(store))

    def baseline(self) -> ShardMirror:
        """This owner's share of the newest version: the training tensors' own bits if they are that version, else
        rebuilt from the bucket.
        """
        found = self._group.from_first_of(lambda: newest(self.store, self.start).model_dump(mode="json"))
        target = Position.model_validate(found)
        if total(self._digests(self.run, self._views(self.run))).hex() == target.state:
            pieces = self._keep(lambda piece, _: self.plan.read(piece, self._reader))
        else:
            pieces = self._rebuild(target)
        keys = [tensor_key(t.name, t.type, t.shape) for t in self.run.tensors]
        return ShardMirror(self.run.tensors, target, measure_pieces(pieces.items(), keys, self._executor), pieces)

    def _prepare(self) -> bool:
        """Rank 0: whether there is a run, perhaps after creating it from the base."""
        try:
            load_run(self.store)
        except RunMissing:
            if self._settings.base is None:
                return False
            tensors, context = read_base(self._settings.base), self._settings.context
            create_run(self.store, tensors, context=context, executor=self._executor, progress=self._progress)
        return True

    def _create(self) -> None:
        """Creates the run with the training tensors as version 0; every owner digests its own pieces."""
        table = self.plan.table
        nothing = StateDigest().hex()
        specs = tuple(
            TensorSpec(name=n, dtype=table.dtypes[n], shape=table.shapes[n], digest=nothing, aliases=table.ties[n])
            for n in sorted(table.shapes)
        )
        draft = Run(run_id=world().token(16), created_at=timestamp("seconds"), state=nothing, tensors=specs)
        digests = self._digests(draft, self._views(draft))
        run = draft.model_copy(
            update={
                "coding": "context" if self._settings.context else "context-free",
                "state": total(digests).hex(),
                "tensors": tuple(s.model_copy(update={"digest": d.hex()}) for s, d in zip(specs, digests, strict=True)),
            }
        )

        def put() -> None:
            if self._group.rank == 0:
                try:
                    self.store.put(RUN_KEY, run.to_bytes(), if_absent=True)
                except PreconditionFailed:
                    raise RunExists(f"{self.store.url}: another trainer created a run here meanwhile") from None

        self._group.together(put)

    def _views(self, run: Run) -> Iterator[tuple[Region, Cells]]:
        return ((region, self.plan.read(piece, self._reader)) for piece, region in self.plan.own(run))

    def _digests(self, run: Run, pieces: Iterable[tuple[Region, Cells]]) -> list[StateDigest]:
        """Of every tensor, summed over the owners."""
        keys = [tensor_key(t.name, t.type, t.shape) for t in run.tensors]
        mine = measure_pieces(pieces, keys, self._executor)
        words = np.array([[d.low, d.high] for d in mine], np.uint64).reshape(-1)
        return [StateDigest(low, high) for low, high in self._group.sums(words).reshape(-1, 2).tolist()]

    def _keep(self, cells: Callable[[Piece, Region], Cells]) -> Pieces:
        """This owner's share, copied piece by piece into RAM, or into an unnamed file, mapped."""
        own = self.plan.own(self.run)
        room = _Room(sum(piece.size_bytes for piece, _ in own), self._settings.baseline_dir)
        return {region: room.keep(cells(piece, region)) for piece, region in own}

    def _rebuild(self, target: Position) -> Pieces:
        """Cuts this owner's share out of a mirror that one rank per machine brings to ``target``.

        The mirror stays in ``state_dir``: the next start goes on from it.
        """
        directory = (self._settings.state_dir or default_state_dir()) / self.run.run_id / "baseline"
        hosts = self._group.gather(socket.gethostname())
        first_here = hosts.index(hosts[self._group.rank]) == self._group.rank
        self._group.together(lambda: self._bring_mirror(directory, target) if first_here else None)
        whole = [copies[0] for copies in match_checkpoint(Checkpoint.open(directory), self.run.tensors)]
        pieces = self._keep(lambda _, region: region.gather(whole[region.tensor]))
        if total(self._digests(self.run, pieces.items())).hex() != target.state:
            raise BadInput(f"{directory}: does not hold version {target.version} of the run; delete it and open again")
        return pieces

    def _bring_mirror(self, directory: Path, target: Position) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        mirror = open_mirror(
            self.store, self.run, self.start, directory,
            base=self._settings.base, executor=self._executor, to_version=target.version, progress=self._progress,
        )  # fmt: skip
        try:
            replay = Replay(
                self.store, self.run, self.start, mirror,
                decoders=self._executor, fetchers=self._executor, progress=self._progress,
            )  # fmt: skip
            for _ in replay.catch_up(to_version=target.version):
                pass
            mirror.flush()
        finally:
            mirror.close()


def newest(store: Store, start: Position) -> Position:
    """The newest committed version; ``start`` is version 0."""
    versions = [manifest_version(o.key) for o in store.list(MANIFEST_PREFIX)]
    return read_position(store, start, max((v for v in versions if v is not None), default=0))


class _Room:
    """Memory for one owner's share: RAM, or an unnamed file in ``directory``, mapped."""

    def __init__(self, size_bytes: int, directory: Path | None) -> None:
        self._at = 0
        self._mapped: Cells | None = None
        if directory is not None and size_bytes:
            directory.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=directory) as handle:
                handle.truncate(size_bytes + 8 * 1024)
                self._mapped = np.memmap(handle, np.uint8, "r+")

    def keep(self, cells: Cells) -> Cells:
        """A copy of ``cells``."""
        if self._mapped is None:
            return cells.copy()
        end = self._at + cells.nbytes
        place = self._mapped[self._at : end].view(cells.dtype)
        place[:] = cells
        self._at = end
        return place
