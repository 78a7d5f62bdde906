"""What one rank fetches of a step: the blocks that touch what it holds, or its tensors of a snapshot."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from dcr_s3.catalogue import end_of, find_fold
from dcr_s3.errors import BadInput, ChainBroken, CorruptObject, NotFound, ObjectGone
from dcr_s3.format.digest import sha256_hex
from dcr_s3.format.fold import Fold
from dcr_s3.format.keys import fold_key, manifest_key, snapshot_marker_key
from dcr_s3.format.manifest import Manifest, SegmentEntry
from dcr_s3.format.run import Run
from dcr_s3.format.segment import TRAILER_BYTES, BlockEntry, parse_tail
from dcr_s3.format.snapshot import Snapshot, SnapshotFile
from dcr_s3.protocol.position import Position
from dcr_s3.reading import fetch_manifest, read_position
from dcr_s3.snapshots import download_file, find_snapshot
from dcr_s3.store.base import Store
from dcr_s3.targets.checkpoint import HEADER_LIMIT_BYTES, Checkpoint
from dcr_s3.targets.engine.bound import Update
from dcr_s3.targets.engine.rank import Draft, RankEngine
from dcr_s3.workers import bounded_map

FETCHERS = 4
GAP_BYTES = 4 << 10
"""Payloads that are not needed but lie in a gap this small between needed ones are read along."""


class Intake:
    """One step of one rank: ``kind`` "delta", "fold" or "snapshot", from ``position`` to version ``last``.

    ``target`` is where it leads, ``draft`` what was decoded so far, ``wire_bytes`` what was fetched.
    """

    def __init__(
        self, store: Store, run: Run, start: Position, rank: RankEngine, position: Position, kind: str, last: int
    ) -> None:
        self.draft = Draft()
        self.wire_bytes = 0
        self._store = store
        self._run = run
        self._rank = rank
        self._position = position
        self._document: Manifest | Fold | Snapshot
        if kind == "snapshot":
            self.target = read_position(store, start, last)
            self._document = self._snapshot()
        elif kind == "fold":
            self.target = read_position(store, start, last)
            self._document = self._fold()
        else:
            found = fetch_manifest(store, position)
            if found is None or found[1].version != last:
                raise ChainBroken(f"version {last} is not committed, or does not follow version {position.version}")
            self._document, self.target, size = found
            self.wire_bytes += size

    def updates(self) -> Iterator[Update]:
        """Fetches and decodes; yields what can be written, piece by piece. Writes nothing.

        Raises ``ObjectGone``, ``CorruptObject``, ``WrongBase``, ``BadInput`` and store errors.
        """
        document = self._document
        if isinstance(document, Snapshot):
            yield from self._replaced(document)
        else:
            yield from self._changed(document)
        yield self._rank.stage(self.draft, last=True)

    def _fold(self) -> Fold:
        first, last = self._position.version, self.target.version
        found = find_fold(self._store, self._run.run_id, first, last)
        if found is None:
            raise ObjectGone(f"{fold_key(first, last)}: is gone or damaged")
        fold, size = found
        self.wire_bytes += size
        if fold.first != end_of(self._position) or fold.last != end_of(self.target):
            raise CorruptObject(f"{fold_key(first, last)}: does not fit the manifests")
        return fold

    def _snapshot(self) -> Snapshot:
        target = self.target
        snapshot = find_snapshot(self._store, self._run.run_id, target.version)
        if snapshot is None:
            raise ObjectGone(f"{snapshot_marker_key(target.version)}: is gone")
        if (snapshot.sha256, snapshot.state) != (target.sha256, target.state):
            raise CorruptObject(f"{snapshot_marker_key(target.version)}: is of another past")
        return snapshot

    def _changed(self, document: Manifest | Fold) -> Iterator[Update]:
        if isinstance(document, Fold):
            name = fold_key(document.first.version, document.last.version)
        else:
            name = manifest_key(document.version)
        with ThreadPoolExecutor(FETCHERS, thread_name_prefix="dcr-fetch") as fetchers:
            fetched = bounded_map(
                fetchers, lambda e: self._fetch(document.key(e), e, name), document.segments, ahead=FETCHERS
            )
            for where, blocks in fetched:
                for block, payload in blocks:
                    self._rank.decode(block, payload, self.draft, where)
                yield self._rank.stage(self.draft, last=False)

    def _fetch(self, key: str, entry: SegmentEntry, name: str) -> tuple[str, list[tuple[BlockEntry, bytes]]]:
        """The blocks of a segment that touch what this rank holds, with their payloads."""
        tail = self._read(key, entry.size_bytes - TRAILER_BYTES - entry.index_bytes, entry.index_bytes + TRAILER_BYTES)
        if sha256_hex(tail[: entry.index_bytes]) != entry.index_sha256:
            raise CorruptObject(f"{key}: its index does not have the digest that {name} names")
        index = parse_tail(bytes(tail), entry.size_bytes, where=key)
        wanted = [b for b in index if b.changed and self._rank.needs(b)]
        for block in wanted:
            self._rank.check(block, key)
        found: list[tuple[BlockEntry, bytes]] = []
        for group in _neighbours(wanted):
            first, last = group[0].offset, group[-1].offset + group[-1].size_bytes
            body = memoryview(self._read(key, first, last - first))
            for block in group:
                payload = bytes(body[block.offset - first :][: block.size_bytes])
                if sha256(payload).digest() != block.sha256:
                    raise CorruptObject(f"{key}: a block does not have the digest that the segment's index names")
                found.append((block, payload))
        return key, found

    def _replaced(self, snapshot: Snapshot) -> Iterator[Update]:
        """The files with needed tensors, one after the other through a temporary directory, each verified first."""
        numbers = {name: n for n, spec in enumerate(self._run.tensors) for name in (spec.name, *spec.aliases)}
        missing = {n for n in range(len(self._run.tensors)) if self._rank.holds_of(n)}
        with tempfile.TemporaryDirectory(prefix="dcr-snapshot-") as folder:
            for file in snapshot.files:
                if missing.isdisjoint(numbers.get(name, -1) for name in self._names(snapshot, file)):
                    continue
                path = Path(folder) / file.name
                with ThreadPoolExecutor(FETCHERS, thread_name_prefix="dcr-fetch") as fetchers:
                    download_file(self._store, snapshot.key(file), file, path, fetchers)
                self.wire_bytes += file.size_bytes
                held = self._open(path, snapshot.key(file))
                for name in held:
                    number = numbers.get(name, -1)
                    if number in missing:
                        missing.remove(number)
                        self._replace(number, held, name, snapshot.key(file))
                        yield self._rank.stage(self.draft, last=False)
                path.unlink()
        if missing:
            name = self._run.tensors[min(missing)].name
            raise CorruptObject(f"{snapshot_marker_key(snapshot.version)}: its files lack tensor {name}")

    def _replace(self, number: int, held: Checkpoint, name: str, key: str) -> None:
        spec, place = self._run.tensors[number], held.places[name]
        if (place.dtype.name, place.shape) != (spec.dtype, spec.shape):
            raise CorruptObject(
                f"{key}: tensor {name} is {place.dtype.name} {list(place.shape)}, "
                f"the run has {spec.dtype} {list(spec.shape)}"
            )
        self._rank.replace(number, held.cells(name), self.draft)

    def _open(self, path: Path, key: str) -> Checkpoint:
        try:
            return Checkpoint.open(path)
        except BadInput as error:
            raise CorruptObject(f"{key}: is no checkpoint file: {error}") from None

    def _names(self, snapshot: Snapshot, file: SnapshotFile) -> list[str]:
        """The tensors of a snapshot's file, by its header alone; none of a file that is no safetensors file."""
        key = snapshot.key(file)
        if not file.name.endswith(".safetensors"):
            return []
        length = int.from_bytes(self._read(key, 0, 8), "little")
        if length > min(HEADER_LIMIT_BYTES, file.size_bytes - 8):
            raise CorruptObject(f"{key}: truncated, or no safetensors file")
        try:
            return list(json.loads(bytes(self._read(key, 8, length))))
        except (ValueError, TypeError, RecursionError):
            raise CorruptObject(f"{key}: its safetensors header is malformed") from None

    def _read(self, key: str, start: int, size_bytes: int) -> bytearray:
        buffer = bytearray(size_bytes)
        try:
            self._store.read_into(key, start, memoryview(buffer))
        except NotFound:
            raise ObjectGone(f"{key}: is gone; load the engine from a newer checkpoint") from None
        self.wire_bytes += size_bytes
        return buffer


def _neighbours(blocks: list[BlockEntry]) -> Iterator[list[BlockEntry]]:
    """Blocks, in the order of the segment, in groups that one request reads."""
    group: list[BlockEntry] = []
    for block in blocks:
        if group and block.offset - (group[-1].offset + group[-1].size_bytes) > GAP_BYTES:
            yield group
            group = []
        group.append(block)
    if group:
        yield group
