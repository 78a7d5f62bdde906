"""Folds: walks a mirror over several versions and publishes their changes as one, coded against the first."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import closing

from dcr_s3.catalogue import end_of, find_fold
from dcr_s3.errors import ChainBroken, PreconditionFailed, StateMismatch, StoreUnavailable
from dcr_s3.format.cells import Cells
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.fold import Fold, FoldEnd
from dcr_s3.format.keys import attempt_name, fold_key, fold_segment_key
from dcr_s3.format.limits import BLOCK_DENSE_BYTES
from dcr_s3.format.manifest import SegmentEntry, Statistics
from dcr_s3.format.region import Region
from dcr_s3.format.run import Run
from dcr_s3.format.segment import SegmentHeader
from dcr_s3.protocol.position import Position
from dcr_s3.reading import fetch_manifest
from dcr_s3.replay import Replay
from dcr_s3.sending.blocks import Block, BlockBuilder, Coded, encode
from dcr_s3.sending.segments import SegmentSizes, SegmentWriter
from dcr_s3.store.base import Store
from dcr_s3.targets.mirror import Mirror
from dcr_s3.targets.undo import UndoLog
from dcr_s3.timeline import Timeline
from dcr_s3.workers import Progress, bounded_map, no_progress
from dcr_s3.world import timestamp, world

log = logging.getLogger(__name__)

ENCODE_AHEAD = 4
LEAST_VERSIONS = 2


class Folder:
    """Makes one fold with one mirror. ``start`` is the run's version 0."""

    def __init__(
        self,
        store: Store,
        run: Run,
        start: Position,
        mirror: Mirror,
        *,
        coders: Executor,
        movers: Executor,
        progress: Progress = no_progress,
    ) -> None:
        self._store = store
        self._run = run
        self._start = start
        self._mirror = mirror
        self._coders = coders
        self._movers = movers
        self._progress = progress

    def fold(self, *, to_version: int | None = None) -> Fold | None:
        """Walks the mirror to the newest version (or ``to_version``) and publishes all of its changes as one fold.

        Returns what the bucket holds then, None if that was less than two versions. Memory holds a few blocks, the
        mirror's workspace the old bits of what changed. Raises ``ChainBroken`` where the chain has a gap; the mirror
        stays at the version it has reached.
        """
        for left in self._mirror.workspace.glob("*.undo"):
            world().unlink(left)
        first = end_of(self._mirror.position)
        with closing(UndoLog(self._mirror.workspace / f"{first.version:012d}.undo")) as undo:
            self._walk(undo, to_version)
            last = self._mirror.position
            if last.version - first.version < LEAST_VERSIONS:
                return None
            existing = find_fold(self._store, self._run.run_id, first.version, last.version)
            if existing is not None:
                return existing[0]
            return self._publish(undo, first, last)

    def _walk(self, undo: UndoLog, to_version: int | None) -> None:
        replay = Replay(
            self._store,
            self._run,
            self._start,
            self._mirror,
            decoders=self._coders,
            fetchers=self._movers,
            progress=self._progress,
            on_changes=undo.record,
        )
        while to_version is None or self._mirror.position.version < to_version:
            found = fetch_manifest(self._store, self._mirror.position)
            if found is None:
                break
            replay.apply(*found)
        if to_version is not None and self._mirror.position.version < to_version:
            raise ChainBroken(f"{self._store.url}: version {to_version} is not committed")

    def _publish(self, undo: UndoLog, first: FoldEnd, last: Position) -> Fold:
        attempt = attempt_name(last.epoch, world().token(6), 0)
        header = SegmentHeader(self._run.run_id, last.version, attempt, 0, 0)
        sizes = SegmentSizes(dense_bytes=max(1, self._run.dense_bytes // 16))
        writer = SegmentWriter(
            self._store,
            header,
            self._movers,
            sizes,
            Timeline(),
            place=lambda h: fold_segment_key(first.version, last.version, h.attempt, h.owner, h.seq),
        )
        try:
            gain, changed, entries = self._encode(undo, writer)
            state = StateDigest.from_hex(first.state) + gain
            if state.hex() != last.state:
                raise StateMismatch(
                    f"the changes from version {first.version} to {last.version} do not lead from one state to the "
                    "other; run `dcr-s3 verify` on this mirror"
                )
            fold = Fold(
                run_id=self._run.run_id,
                first=first,
                last=end_of(last),
                attempt=attempt,
                created_at=timestamp(),
                segments=tuple(entries),
                statistics=Statistics(
                    total_elements=self._run.total_elements,
                    changed_elements=changed,
                    dense_bytes=self._run.dense_bytes,
                    segment_bytes=sum(e.size_bytes for e in entries),
                ),
            )
        except BaseException:
            writer.abort()
            raise
        return self._create(fold, writer)

    def _encode(self, undo: UndoLog, writer: SegmentWriter) -> tuple[StateDigest, int, list[SegmentEntry]]:
        """Codes every block with changes; the change of the state digest, changed cells, and the segments."""
        gain, changed = StateDigest(), 0

        def one(block: Block) -> Coded | None:
            return encode(block, _old_cells(undo, block), self._mirror.keys, context=self._run.coding == "context")

        for coded in bounded_map(self._coders, one, self._blocks(undo), ahead=ENCODE_AHEAD):
            if coded is not None:
                gain += coded.entry.new - coded.entry.old
                changed += coded.entry.changed
                writer.append(coded.entry, coded.payload)
        return gain, changed, writer.finish()

    def _blocks(self, undo: UndoLog) -> Iterator[Block]:
        """Blocks of all pieces in which something was overwritten."""
        builder = BlockBuilder()
        done = 0
        for number, spec in enumerate(self._mirror.specs):
            cells = self._mirror.cells(number)
            step = BLOCK_DENSE_BYTES // spec.type.cell_bytes
            for begin in range(0, spec.cells, step):
                end = min(begin + step, spec.cells)
                if undo.touched(number, begin, end):
                    yield from builder.add(spec.type, Region.run(number, begin, end - begin), cells[begin:end])
            done += spec.size_bytes
            self._progress("fold", done, self._run.dense_bytes)
        yield from builder.flush()

    def _create(self, fold: Fold, writer: SegmentWriter) -> Fold:
        """Creates the fold's manifest, or finds another one; what lies under the key decides.

        Where that stays unknown the segments stay too: the manifest may still arrive.
        """
        key = fold_key(fold.first.version, fold.last.version)
        lost: StoreUnavailable | None = None
        try:
            self._store.put(key, bytearray(fold.to_bytes()), if_absent=True)
            return fold
        except PreconditionFailed:
            pass
        except StoreUnavailable as error:
            lost = error
        found = find_fold(self._store, self._run.run_id, fold.first.version, fold.last.version)
        if found is None:
            raise lost or ChainBroken(f"{self._store.url}/{key}: exists but is no fold of this run; delete it")
        if found[0].attempt != fold.attempt:
            log.info("%s/%s: another writer was faster", self._store.url, key)
            writer.abort()
        return found[0]


def _old_cells(undo: UndoLog, block: Block) -> list[Cells]:
    """The block's cells as they were at the first version."""
    old = []
    for region, new in zip(block.regions, block.new, strict=True):
        cells = new.copy()
        undo.restore(region.tensor, region.start, cells)
        old.append(cells)
    return old
