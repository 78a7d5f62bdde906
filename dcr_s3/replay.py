"""Brings a mirror from its version to the next: fetch, verify, decode, stage, apply.

Used by receivers and by a sender's baseline.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from hashlib import sha256

from dcr_s3.delta import decode_block
from dcr_s3.delta.account import TensorChange, account, totals
from dcr_s3.errors import ChainBroken, CorruptObject, NotFound, WrongBase
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.keys import manifest_key, segment_key
from dcr_s3.format.manifest import Manifest, SegmentEntry
from dcr_s3.format.run import Run
from dcr_s3.format.segment import BlockEntry, Segment, parse_segment
from dcr_s3.protocol.position import Position
from dcr_s3.reading import fetch_manifest
from dcr_s3.store.base import Store
from dcr_s3.targets.mirror import Mirror, describe, total
from dcr_s3.targets.redo import RedoRecord, RedoWriter
from dcr_s3.workers import Progress, abandon, bounded_map, no_progress
from dcr_s3.world import world

log = logging.getLogger(__name__)

RANGE_BYTES = 8 << 20
FETCH_AHEAD = 4
AHEAD_SEGMENT_BYTES = 64 << 20


@dataclass
class Staged:
    """One decoded segment: its redo file and what it does to the state digest."""

    sha256: str
    size_bytes: int
    redo: RedoWriter
    changes: list[TensorChange] = field(default_factory=list)
    changed_cells: int = 0


@dataclass(frozen=True)
class Applied:
    """What one version took. ``seconds`` by stage; fetch and decode overlap."""

    manifest: Manifest
    wire_bytes: int
    seconds: dict[str, float]


class Replay:
    """Moves one mirror along one run. One version at a time; segments in parallel."""

    def __init__(
        self,
        store: Store,
        run: Run,
        mirror: Mirror,
        *,
        decoders: Executor,
        fetchers: Executor,
        progress: Progress = no_progress,
    ) -> None:
        self.store = store
        self.run = run
        self.mirror = mirror
        self._decoders = decoders
        self._fetchers = fetchers
        self._progress = progress
        self._ahead: dict[str, Staged] = {}

    def catch_up(self, *, to_version: int | None = None) -> Iterator[Applied]:
        """Applies version after version until none is left (or ``to_version`` is reached)."""
        while to_version is None or self.mirror.position.version < to_version:
            begun = world().monotonic()
            found = fetch_manifest(self.store, self.mirror.position)
            if found is None:
                return
            manifest, target, size = found
            yield self.apply(manifest, target, size, poll_s=world().monotonic() - begun)

    def apply(self, manifest: Manifest, target: Position, manifest_bytes: int, *, poll_s: float = 0.0) -> Applied:
        """Applies one manifest. Nothing of the mirror is touched before all of it is fetched, decoded and proved."""
        begun = world().monotonic()
        staged = self._stage_all(manifest)
        try:
            digests = self._prove(manifest, staged)
            middle = world().monotonic()
            self.mirror.advance(target, [s.redo for s in staged], digests, self._decoders)
        except BaseException:
            self._discard(staged)
            raise
        self.drop_ahead()
        wire = manifest_bytes + sum(s.size_bytes for s in staged)
        seconds = {"manifest": poll_s, "fetch_decode": middle - begun, "apply": world().monotonic() - middle}
        return Applied(manifest, wire, seconds)

    def stage_ahead(self, seq: int) -> bool:
        """Fetches and decodes one segment of the version that is being written, if it is there.

        Its place is predicted from the last manifest. Nothing is decided by it: a segment that the committed manifest
        does not name with the same digest is dropped.
        """
        position = self.mirror.position
        if position.next_attempt is None:
            return False
        key = segment_key(position.version + 1, position.next_attempt, 0, seq)
        if key in self._ahead:
            return True
        try:
            found = self.store.get(key, limit_bytes=AHEAD_SEGMENT_BYTES)
            assert found is not None
            self._ahead[key] = self._stage(key, memoryview(found.body), sha256(found.body).hexdigest())
        except NotFound:
            return False
        except (CorruptObject, WrongBase) as error:
            log.warning("segment %s, fetched before its commit, is left out: %s", key, error)
            return False
        return True

    def drop_ahead(self) -> None:
        """Forgets segments fetched ahead."""
        self._discard(list(self._ahead.values()))
        self._ahead.clear()

    def _stage_all(self, manifest: Manifest) -> list[Staged]:
        staged: list[Staged] = []
        jobs = [(manifest, entry) for entry in manifest.segments if not self._take_ahead(manifest, entry, staged)]
        total_bytes = sum(e.size_bytes for e in manifest.segments)
        done = sum(s.size_bytes for s in staged)
        try:
            for entry, body in bounded_map(self._fetchers, self._fetch, jobs, ahead=FETCH_AHEAD):
                key = segment_key(manifest.version, manifest.attempt, entry.owner, entry.seq)
                staged.append(self._stage(key, memoryview(body), entry.sha256))
                done += entry.size_bytes
                self._progress("pull", done, total_bytes)
        except BaseException:
            self._discard(staged)
            raise
        return staged

    def _take_ahead(self, manifest: Manifest, entry: SegmentEntry, staged: list[Staged]) -> bool:
        found = self._ahead.get(segment_key(manifest.version, manifest.attempt, entry.owner, entry.seq))
        if found is None or found.sha256 != entry.sha256:
            return False
        del self._ahead[segment_key(manifest.version, manifest.attempt, entry.owner, entry.seq)]
        staged.append(found)
        return True

    def _fetch(self, job: tuple[Manifest, SegmentEntry]) -> tuple[SegmentEntry, bytearray]:
        manifest, entry = job
        key = segment_key(manifest.version, manifest.attempt, entry.owner, entry.seq)
        body = bytearray(entry.size_bytes)
        view = memoryview(body)
        try:
            for start in range(0, len(body), RANGE_BYTES):
                self.store.read_into(key, start, view[start : start + RANGE_BYTES])
        except NotFound:
            raise ChainBroken(
                f"{key}: version {manifest.version} names it, but it is gone; start from a newer state"
            ) from None
        if sha256(body).hexdigest() != entry.sha256:
            raise CorruptObject(f"{key}: its bytes do not have the digest that {manifest_key(manifest.version)} names")
        return entry, body

    def _stage(self, key: str, body: memoryview, digest: str) -> Staged:
        """Decodes a whole segment against the mirror as it is and writes its redo file."""
        segment = parse_segment(body, where=key)
        self._check_place(key, segment)
        redo = self.mirror.redo(key.removeprefix("segments/").replace("/", "_"))
        staged = Staged(digest, len(body), redo)
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
        return account_, RedoRecord(block.regions, changes.positions, changes.new)

    def _check_place(self, key: str, segment: Segment) -> None:
        header = segment.header
        if (
            header.run_id != self.run.run_id
            or segment_key(header.version, header.attempt, header.owner, header.seq) != key
        ):
            raise CorruptObject(f"{key}: its header says that it is another segment, or of another run")

    def _prove(self, manifest: Manifest, staged: Sequence[Staged]) -> list[StateDigest]:
        """Digests of every tensor after the version; they must add up to what the manifest promises."""
        digests = list(self.mirror.digests)
        for change in (c for s in staged for c in s.changes):
            digests[change.tensor] += change.new - change.old
        state = total(digests).hex()
        if state != manifest.state_after:
            key = manifest_key(manifest.version)
            raise CorruptObject(f"{key}: its segments lead to state {state}, it promises {manifest.state_after}")
        return digests

    @staticmethod
    def _discard(staged: Sequence[Staged]) -> None:
        for item in staged:
            item.redo.discard()
