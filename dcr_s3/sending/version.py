"""One version being written: tensors in, blocks scanned and coded by workers, segments streaming out."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from dcr_s3.delta.account import TensorChange
from dcr_s3.errors import BadInput, CommitConflict, Fenced, OwnerFailed
from dcr_s3.format.cells import Cells
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.limits import BLOCK_DENSE_BYTES
from dcr_s3.format.manifest import SegmentEntry
from dcr_s3.format.region import Region
from dcr_s3.format.run import Run
from dcr_s3.format.segment import BlockEntry
from dcr_s3.mapping.cells import Source, mapped_source, tensor_source
from dcr_s3.reports import PublishReport
from dcr_s3.sending.blocks import Block, BlockBuilder, encode
from dcr_s3.sending.segments import SegmentWriter
from dcr_s3.sending.tiles import tiles
from dcr_s3.targets.checkpoint import Checkpoint, describe
from dcr_s3.targets.mirror import Mirror, total
from dcr_s3.targets.redo import RedoRecord, RedoWriter
from dcr_s3.timeline import Timeline
from dcr_s3.workers import Progress, abandon, no_progress

COPY_LIMIT_BYTES = 4 * BLOCK_DENSE_BYTES


@dataclass(frozen=True)
class _Encoded:
    """A block's way from worker to segment; ``entry`` is None where nothing changed."""

    dense_bytes: int
    entry: BlockEntry | None = None
    payload: bytes = b""
    changes: tuple[TensorChange, ...] = ()


@dataclass(frozen=True)
class Draft:
    """All a manifest needs to know of a finished version."""

    segments: tuple[SegmentEntry, ...]
    digests: tuple[StateDigest, ...]
    gain: StateDigest
    touched: tuple[int, ...]
    changed_elements: int
    redo: RedoWriter | None


class VersionWriter:
    """Takes every tensor of the run once, in any order; leaving the block commits.

    Memory is bounded: at most ``ahead`` blocks wait for a worker or for their turn in a segment. If the block is left
    by an exception, uploads are aborted, the attempt's objects deleted, and neither bucket nor baseline changes.
    """

    def __init__(
        self,
        run: Run,
        baseline: Mirror,
        segments: SegmentWriter,
        redo: RedoWriter,
        *,
        encoders: Executor,
        ahead: int,
        commit: Callable[[VersionWriter, Draft], PublishReport],
        failed: Callable[[BaseException], None],
        release: Callable[[], None],
        timeline: Timeline,
        step: int | None,
        parts: int = 1,
        progress: Progress = no_progress,
    ) -> None:
        self.step = step
        self._parts = parts
        self._report: PublishReport | None = None
        self.timeline = timeline
        self._run = run
        self._numbers = {name: n for n, t in enumerate(run.tensors) for name in (t.name, *t.aliases)}
        self._baseline = baseline
        self._segments = segments
        self._redo = redo
        self._encoders = encoders
        self._ahead = ahead
        self._commit = commit
        self._failed = failed
        self._release = release
        self._progress = progress
        self._builder = BlockBuilder()
        self._added: dict[int, str] = {}
        self._cells = [0] * len(run.tensors)
        self._tied: dict[int, Source] = {}
        self._pending: deque[Future[_Encoded]] = deque()
        self._order = threading.Lock()
        self._error: BaseException | None = None
        self._digests = list(baseline.digests)
        self._touched: set[int] = set()
        self._changed = 0
        self._done_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._abort(error)
            return
        try:
            draft = self._finish()
        except BaseException as own:
            self._abort(own)
            raise
        try:
            self._report = self._commit(self, draft)
        except (CommitConflict, Fenced, OwnerFailed) as lost:
            self._abort(lost)
            raise
        except BaseException:
            # The manifest may exist: what it names must stay, and the redo file may be needed to recover.
            self._release()
            raise

    @property
    def report(self) -> PublishReport:
        """What was published. Raises ``BadInput`` before the block has been left."""
        if self._report is None:
            raise BadInput("this version is not committed (yet); leave its block first")
        return self._report

    def add(self, name: str, tensor: Any, *, borrow: bool = False) -> None:
        """Adds one tensor, on any device, with the dtype and shape that the run has for this name.

        When it returns the caller may overwrite the tensor, unless ``borrow`` promises that its memory stays untouched
        until the block is left, which saves a copy. Raises ``BadInput`` for a name that is unknown or was added already
        and for another dtype or shape; also the error of an earlier tensor's encoding or upload.
        """
        self._add(name, tensor_source(name, tensor), borrow)

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Adds every tensor of a checkpoint directory, which must not change until the block is left."""
        for name, place in checkpoint.places.items():
            self._add(name, mapped_source(place.dtype, place.shape, checkpoint.cells(name)), borrow=True)

    def add_piece(self, region: Region, cells: Cells) -> None:
        """Adds one piece of this owner's share: flat cells in the region's order, at most a block of them.

        Their memory must stay untouched until :meth:`scan` returns or the block is left. Raises ``BadInput`` for other
        cells than the baseline keeps; also the error of an earlier piece's encoding or upload.
        """
        dtype = self._run.tensors[region.tensor].type
        if cells.size != region.cells or cells.itemsize != dtype.cell_bytes:
            raise BadInput(
                f"tensor {self._run.tensors[region.tensor].name}: a piece of {region.cells} {dtype.name} cells came as "
                f"{cells.size} of {cells.itemsize} bytes"
            )
        self._cells[region.tensor] += region.cells
        for block in self._builder.add(dtype, region, cells):
            self._submit(block)

    def add_unchanged(self, region: Region) -> None:
        """Counts a piece whose bits are those of the version before, which the caller knows."""
        self._cells[region.tensor] += region.cells
        self._progressed(region.cells * self._run.tensors[region.tensor].type.cell_bytes)

    def scan(self) -> None:
        """Returns once everything added so far has been compared, so that its memory may change."""
        for block in self._builder.flush():
            self._submit(block)
        for future in list(self._pending):
            future.exception()
        self._raise_error()

    def _add(self, name: str, source: Source, borrow: bool) -> None:
        self._raise_error()
        number = self._check(name, source)
        if number is None:
            return
        dtype = self._run.tensors[number].type
        if self._parts > 1 and len(source.shape) == 2 and dtype.bits >= 8 and min(source.shape) >= self._parts:
            self._add_tiles(number, source)
            return
        keep = borrow or self._run.tensors[number].size_bytes >= COPY_LIMIT_BYTES
        futures = []
        for start, cells in source.pieces(BLOCK_DENSE_BYTES):
            piece = cells if keep else cells.copy()
            for block in self._builder.add(dtype, Region.run(number, start, cells.size), piece):
                futures.append(self._submit(block))
        if keep and not borrow:
            futures += [self._submit(b) for b in self._builder.flush()]
            for future in futures:
                future.exception()

    def _add_tiles(self, number: int, source: Source) -> None:
        """Adds a matrix in tiles, which are copies: its memory is not needed afterwards."""
        rows, columns = source.shape
        blocks = list(self._builder.flush())
        for region, cells in tiles(number, (rows, columns), source.whole(), self._parts, BLOCK_DENSE_BYTES):
            blocks += self._builder.add(self._run.tensors[number].type, region, cells)
            blocks += self._builder.flush()
            while blocks:
                self._submit(blocks.pop(0))

    def _check(self, name: str, source: Source) -> int | None:
        """The tensor's number; None for a tied name whose tensor was added under another one."""
        if name not in self._numbers:
            raise BadInput(f"tensor {name}: unknown to the run, which has {len(self._run.tensors)} tensors")
        number = self._numbers[name]
        spec = self._run.tensors[number]
        mine, wanted = (source.dtype.name, list(source.shape)), (spec.dtype, list(spec.shape))
        if mine != wanted:
            raise BadInput(f"tensor {name}: is {mine[0]} {mine[1]}, the run has {wanted[0]} {wanted[1]}")
        if number not in self._added:
            self._added[number] = name
            self._cells[number] = spec.cells
            if spec.aliases:
                self._tied[number] = source
            return number
        if self._added[number] == name:
            raise BadInput(f"tensor {name}: added twice")
        if not source.same_bits(self._tied[number]):
            raise BadInput(f"tensor {name}: the run ties it to {self._added[number]}, but their bits differ")
        return None

    def _submit(self, block: Block) -> Future[_Encoded]:
        self._raise_error()
        while len(self._pending) >= self._ahead:
            self._wait()
        future = self._encoders.submit(self._encode, block)
        self._pending.append(future)
        future.add_done_callback(lambda _: self._drain())
        return future

    def _encode(self, block: Block) -> _Encoded:
        with self.timeline.stage("scan_encode"):
            old = [self._baseline.gather(region) for region in block.regions]
            coded = encode(block, old, self._baseline.keys, context=self._run.coding == "context")
            if coded is None:
                return _Encoded(block.size_bytes)
            self._redo.append(RedoRecord(coded.entry.regions, coded.positions, coded.new))
            return _Encoded(block.size_bytes, coded.entry, coded.payload, coded.changes)

    def _wait(self) -> None:
        """Until the oldest block has been taken."""
        with self._order:
            head = self._pending[0] if self._pending else None
        if head is not None:
            head.exception()
            self._drain()
        self._raise_error()

    def _unfinished(self) -> bool:
        """Whether a block is still to be taken; not while another thread is taking the last one."""
        with self._order:
            return bool(self._pending) and self._error is None

    def _drain(self) -> None:
        """Takes finished blocks from the head of the queue, in order, whichever thread finished them."""
        with self._order:
            while self._error is None and self._pending and self._pending[0].done():
                try:
                    self._take(self._pending.popleft().result())
                except BaseException as error:
                    self._error = error

    def _take(self, block: _Encoded) -> None:
        if block.entry is None:
            self._segments.passed(block.dense_bytes)
        else:
            self._segments.append(block.entry, block.payload)
            self._changed += block.entry.changed
        for change in block.changes:
            self._digests[change.tensor] += change.new - change.old
            self._touched.add(change.tensor)
        self._progressed(block.dense_bytes)

    def _progressed(self, dense_bytes: int) -> None:
        self._done_bytes += dense_bytes
        self._progress("publish", self._done_bytes, self._run.dense_bytes)

    def _finish(self) -> Draft:
        missing = [t.name for n, t in enumerate(self._run.tensors) if self._cells[n] != self._baseline.held_cells(n)]
        if missing:
            raise BadInput(f"version is incomplete: {describe(missing)} not added; every version names every tensor")
        for block in self._builder.flush():
            self._submit(block)
        while self._unfinished():
            self._wait()
        self._raise_error()
        entries = tuple(self._segments.finish())
        gain = total(self._digests) - total(self._baseline.digests)
        return Draft(entries, tuple(self._digests), gain, tuple(sorted(self._touched)), self._changed, self._redo)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _abort(self, error: BaseException) -> None:
        with self._order:
            self._error = self._error or RuntimeError("aborted")
        self._failed(error)
        abandon(list(self._pending))
        self._segments.abort()
        self._redo.discard()
        self._release()
