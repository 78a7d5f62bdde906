"""Brings a mirror from its version to the next: fetch, verify, decode, stage, apply.

Used by receivers and by a sender's baseline.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

from dcr_s3.catalogue import Catalogue
from dcr_s3.delta import Changes, decode_block
from dcr_s3.delta.account import TensorChange, account, totals
from dcr_s3.errors import CorruptObject, NotFound, ObjectGone, RetryError, WrongBase
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.fold import Fold
from dcr_s3.format.keys import fold_key, manifest_key
from dcr_s3.format.manifest import Manifest, SegmentEntry
from dcr_s3.format.region import Region
from dcr_s3.format.run import Run
from dcr_s3.format.segment import BlockEntry, SegmentHeader, parse_segment
from dcr_s3.format.snapshot import Snapshot
from dcr_s3.lookahead import Lookahead, Place
from dcr_s3.protocol.plan import Edge
from dcr_s3.protocol.position import Position
from dcr_s3.snapshots import download_snapshot, measure_snapshot
from dcr_s3.staging import Staged, keep, kept
from dcr_s3.store.base import Store
from dcr_s3.targets.checkpoint import describe
from dcr_s3.targets.mirror import Mirror, total
from dcr_s3.targets.redo import RedoRecord, StateJournal, remove_directory
from dcr_s3.ways import Ways
from dcr_s3.workers import Progress, abandon, bounded_map, no_progress
from dcr_s3.world import world

log = logging.getLogger(__name__)

RANGE_BYTES = 8 << 20
FETCH_AHEAD = 4


OnChanges = Callable[[Sequence[Region], Changes], None]
"""Told of every block's changes, old bits included, before they are applied; perhaps from several threads."""


@dataclass(frozen=True)
class Applied:
    """What one step took: a version's delta, or a fold or snapshot that leads over several versions. ``seconds`` by
    stage; fetch and decode overlap.
    """

    kind: Literal["delta", "fence", "fold", "snapshot"]
    version: int
    changed_elements: int
    wire_bytes: int
    seconds: dict[str, float]


class Replay:
    """Moves one mirror along one run, whose version 0 is ``start``. One step at a time; segments in parallel."""

    def __init__(
        self,
        store: Store,
        run: Run,
        start: Position,
        mirror: Mirror,
        *,
        decoders: Executor,
        fetchers: Executor,
        progress: Progress = no_progress,
        on_changes: OnChanges | None = None,
    ) -> None:
        self.store = store
        self.run = run
        self._start = start
        self.mirror = mirror
        self._decoders = decoders
        self._fetchers = fetchers
        self._progress = progress
        self._on_changes = on_changes
        self._ahead: dict[str, Staged] | None = None
        self._owners = 1
        self._lookahead = Lookahead(store, fetchers)

    @property
    def position(self) -> Position:
        """Where the mirror stands."""
        return self.mirror.position

    def catch_up(self, *, to_version: int | None = None) -> Iterator[Applied]:
        """Applies version after version until none is left (or ``to_version`` is reached).

        A mirror that is several versions behind, or whose next version was deleted, goes the cheapest way that the
        bucket offers instead. Raises ``ChainBroken`` if there is none.
        """
        return Ways(self.store, self._start, self._fetchers).catch_up(self, to_version=to_version)

    def apply(self, manifest: Manifest, target: Position, manifest_bytes: int, *, poll_s: float = 0.0) -> Applied:
        """Applies one manifest. Nothing of the mirror is touched before all of it is fetched, decoded and proved."""
        return self._apply(manifest, manifest.kind, manifest_key(manifest.version), target, manifest_bytes, poll_s)

    def _apply(
        self,
        document: Manifest | Fold,
        kind: Literal["delta", "fence", "fold"],
        name: str,
        target: Position,
        document_bytes: int,
        poll_s: float = 0.0,
    ) -> Applied:
        begun = world().monotonic()
        staged = self._stage_all(document, name, target.version)
        try:
            digests = self._prove(name, target, staged)
        except BaseException:
            _discard(staged)
            raise
        middle = world().monotonic()
        # From here on the redo files belong to the mirror, which may need them to finish after an interruption.
        for one in staged:
            one.hand_over()
        self.mirror.advance(target, [s.redo for s in staged], digests, self._decoders)
        wire = document_bytes + sum(s.size_bytes for s in staged)
        seconds = {"manifest": poll_s, "fetch_decode": middle - begun, "apply": world().monotonic() - middle}
        return Applied(kind, target.version, document.statistics.changed_elements, wire, seconds)

    def take(self, edge: Edge, catalogue: Catalogue) -> Applied:
        """Takes one step that the bucket offers."""
        target = catalogue.positions[edge.last]
        if edge.kind == "snapshot":
            return self._apply_snapshot(catalogue.snapshots[edge.last], target)
        if edge.kind == "fold":
            fold = catalogue.folds[edge.first, edge.last]
            fold_bytes = edge.size_bytes - sum(s.size_bytes for s in fold.segments)
            return self._apply(fold, "fold", fold_key(edge.first, edge.last), target, fold_bytes)
        manifest = catalogue.manifests[edge.last]
        return self.apply(manifest, target, edge.size_bytes - sum(s.size_bytes for s in manifest.segments))

    def _apply_snapshot(self, snapshot: Snapshot, target: Position) -> Applied:
        """Replaces every cell. The download is kept as the journal until the cells are durable."""
        begun = world().monotonic()
        directory = self.mirror.workspace / f"incoming-{snapshot.folder}"
        for other in self.mirror.workspace.glob("incoming-*"):
            if other != directory:
                remove_directory(other)
        download_snapshot(self.store, snapshot, directory, self._fetchers, self._progress)
        digests = measure_snapshot(snapshot, directory, self.mirror.specs, self._decoders, self._progress)
        middle = world().monotonic()
        journal = directory.with_name(f"{target.version:012d}-{snapshot.folder}.state")
        remove_directory(journal)
        world().replace(directory, journal)
        self.drop_ahead()
        self.mirror.advance(target, [StateJournal(journal)], digests, self._decoders)
        self.mirror.flush()
        seconds = {"fetch_decode": middle - begun, "apply": world().monotonic() - middle}
        return Applied("snapshot", target.version, self.run.total_elements, snapshot.size_bytes, seconds)

    def stage_ahead(self) -> bool:
        """Fetches and decodes one segment of the version that is being written; False if there is no further one yet.

        Its place is predicted: from the last manifest, and by taking every owner's segments in turn. Nothing is decided
        by it: a segment that the committed manifest does not name with the same digest is dropped.
        """
        position = self.mirror.position
        if position.next_attempt is None:
            return False
        held = self._fetched_ahead()
        return self._lookahead.find(
            position.version + 1, position.next_attempt, self._owners, held, self._take_before_commit
        )

    def _take_before_commit(self, place: Place, body: bytes) -> bool:
        key = place.key
        try:
            self._fetched_ahead()[key] = self._stage(key, place, memoryview(body), sha256(body).hexdigest())
        except (CorruptObject, WrongBase) as error:
            log.warning("segment %s, fetched before its commit, is left out: %s", key, error)
            return False
        return True

    def drop_ahead(self) -> None:
        """Forgets segments fetched ahead."""
        _discard(list(self._fetched_ahead().values()))
        self._ahead = {}
        self._lookahead.forget()

    def _fetched_ahead(self) -> dict[str, Staged]:
        """By key, what was staged but not applied, perhaps by an earlier process."""
        if self._ahead is None:
            self._ahead = {staged.key: staged for staged in kept(self.mirror.workspace, self.mirror.position)}
            if self._on_changes is not None:
                # Whoever wants to be told of changes was not told of these.
                self.drop_ahead()
        return self._ahead

    def _stage_all(self, document: Manifest | Fold, name: str, version: int) -> list[Staged]:
        staged: list[Staged] = []
        if document.segments:
            self._owners = 1 + max(entry.owner for entry in document.segments)
        entries = [e for e in document.segments if not self._take_ahead(document.key(e), e, staged)]
        self.drop_ahead()  # now, before redo files of the same names are written
        total_bytes = sum(e.size_bytes for e in document.segments)
        done = sum(s.size_bytes for s in staged)

        def fetch(entry: SegmentEntry) -> tuple[SegmentEntry, bytearray]:
            return entry, self._fetch(document.key(entry), entry, name)

        try:
            for entry, body in bounded_map(self._fetchers, fetch, entries, ahead=FETCH_AHEAD):
                place = Place(version, document.attempt, entry.owner, entry.seq)
                staged.append(self._stage(document.key(entry), place, memoryview(body), entry.sha256))
                done += entry.size_bytes
                self._progress("pull", done, total_bytes)
        except RetryError:
            self._ahead = {s.key: s for s in staged}
            raise
        except Exception:
            _discard(staged)
            raise
        return staged

    def _take_ahead(self, key: str, entry: SegmentEntry, staged: list[Staged]) -> bool:
        ahead = self._fetched_ahead()
        found = ahead.get(key)
        if found is None or found.sha256 != entry.sha256:
            return False
        del ahead[key]
        staged.append(found)
        return True

    def _fetch(self, key: str, entry: SegmentEntry, name: str) -> bytearray:
        body = bytearray(entry.size_bytes)
        view = memoryview(body)
        try:
            for start in range(0, len(body), RANGE_BYTES):
                self.store.read_into(key, start, view[start : start + RANGE_BYTES])
        except NotFound:
            raise ObjectGone(f"{key}: {name} names it, but it is gone; start from a newer state") from None
        if sha256(body).hexdigest() != entry.sha256:
            raise CorruptObject(f"{key}: its bytes do not have the digest that {name} names")
        return body

    def _stage(self, key: str, place: Place, body: memoryview, digest: str) -> Staged:
        """Decodes a whole segment against the mirror as it is and writes its redo file."""
        segment = parse_segment(body, where=key)
        self._check_place(key, place, segment.header)
        redo = self.mirror.redo(key.replace("/", "_"))
        staged = Staged(key, digest, len(body), redo)
        lock = threading.Lock()

        def one(block: BlockEntry) -> None:
            changes, record = self._decode(key, block, body[block.offset : block.offset + block.size_bytes])
            redo.append(record)
            with lock:
                staged.changes.extend(changes)
                staged.changed_cells += block.changed

        futures = [self._decoders.submit(one, block) for block in segment.blocks if block.changed]
        try:
            for future in futures:
                future.result()
        except BaseException:
            abandon(futures)
            redo.discard()
            raise
        keep(staged, redo, self.mirror.position)
        return staged

    def _decode(self, key: str, block: BlockEntry, payload: memoryview) -> tuple[list[TensorChange], RedoRecord]:
        specs = self.mirror.specs
        for region in block.regions:
            if region.tensor >= len(specs) or specs[region.tensor].type != block.dtype:
                raise CorruptObject(
                    f"{key}: a block names tensor {region.tensor} as {block.dtype.name}; the run has no such tensor"
                )
            try:
                region.check(specs[region.tensor].cells)
            except ValueError as error:
                raise CorruptObject(f"{key}: tensor {specs[region.tensor].name}: {error}") from None
        old = [region.gather(self.mirror.cells(region.tensor)) for region in block.regions]
        names = describe([specs[r.tensor].name for r in block.regions])
        try:
            changes = decode_block(block.dtype, block.coding, payload, block.changed, old)
        except CorruptObject as error:
            raise WrongBase(
                f"{key}: {names} cannot be decoded ({error}) though the object is intact, "
                "so the bits held here are not those the delta was made from; run `dcr-s3 verify`"
            ) from None
        account_ = account(block.regions, changes, self.mirror.keys)
        old_sum, new_sum = totals(account_)
        if old_sum != block.old or new_sum != block.new:
            raise WrongBase(
                f"{key}: {names}: the bits held here are not those the delta was made from; run `dcr-s3 verify`"
            )
        if self._on_changes is not None:
            self._on_changes(block.regions, changes)
        return account_, RedoRecord(block.regions, changes.positions, changes.new)

    def _check_place(self, key: str, place: Place, header: SegmentHeader) -> None:
        says = Place(header.version, header.attempt, header.owner, header.seq)
        if header.run_id != self.run.run_id or says != place:
            raise CorruptObject(f"{key}: its header says that it is another segment, or of another run")

    def _prove(self, name: str, target: Position, staged: Sequence[Staged]) -> list[StateDigest]:
        """Digests of every tensor after the step; they must add up to the state that it promises."""
        digests = list(self.mirror.digests)
        for change in (c for s in staged for c in s.changes):
            digests[change.tensor] += change.new - change.old
        state = total(digests).hex()
        if state != target.state:
            raise CorruptObject(f"{name}: its segments lead to state {state}, it promises {target.state}")
        return digests


def _discard(staged: Sequence[Staged]) -> None:
    for item in staged:
        item.discard()
