"""What a bucket offers to get from one version to another: deltas, folds, snapshots, each only if it is complete."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from dcr_s3.errors import ChainBroken, CorruptObject, NotFound
from dcr_s3.format import limits
from dcr_s3.format.fold import Fold, FoldEnd
from dcr_s3.format.keys import (
    FOLD_PREFIX,
    MANIFEST_PREFIX,
    SEGMENT_PREFIX,
    SNAPSHOT_PREFIX,
    fold_key,
    fold_versions,
    manifest_key,
    manifest_version,
    snapshot_version,
)
from dcr_s3.format.manifest import Manifest
from dcr_s3.format.snapshot import Snapshot
from dcr_s3.protocol.chain import check_follows, position_after
from dcr_s3.protocol.plan import Edge
from dcr_s3.protocol.position import Position
from dcr_s3.reading import read_manifest
from dcr_s3.snapshots import find_snapshot
from dcr_s3.store.base import ObjectInfo, Store
from dcr_s3.workers import bounded_map

log = logging.getLogger(__name__)

AHEAD = 16


@dataclass
class Catalogue:
    """Edges and the documents behind them, by version. ``newest`` is the newest committed version."""

    newest: int
    positions: dict[int, Position]
    edges: list[Edge] = field(default_factory=list)
    manifests: dict[int, Manifest] = field(default_factory=dict)
    folds: dict[tuple[int, int], Fold] = field(default_factory=dict)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    attempts: dict[int, str] = field(default_factory=dict)
    """Committed attempt by version, also of versions whose segments are gone."""


def read_catalogue(store: Store, start: Position, held: Position | None, fetchers: Executor) -> Catalogue:
    """Lists and reads what leads on from ``held`` (None: from nothing); ``start`` is the run's version 0.

    A document that is damaged, or does not fit the manifests, is left out and logged: there may be another way.
    """
    present = {o.key: o for prefix in (SNAPSHOT_PREFIX, FOLD_PREFIX) for o in store.list(prefix)}
    versions = sorted(v for v in map(snapshot_version, present) if v is not None)
    if held is None and not versions:
        return Catalogue(0, {0: start})
    first = held.version if held is not None else versions[0]
    after = first - 1 if held is None and first else first
    listed = [manifest_version(o.key) for o in store.list(MANIFEST_PREFIX, start_after=manifest_key(after))]
    # "~" sorts after "/": a bound that is itself a folder's name makes SeaweedFS pass over the folder.
    present |= {o.key: o for o in store.list(SEGMENT_PREFIX, start_after=f"{SEGMENT_PREFIX}{after:012d}~")}
    catalogue = Catalogue(after, {0: start} if held is None else {0: start, held.version: held})
    _add_deltas(store, catalogue, [v for v in listed if v is not None], present, fetchers)
    _add_folds(store, catalogue, [f for f in map(fold_versions, present) if f is not None], present, fetchers)
    _add_snapshots(store, catalogue, versions, present, fetchers)
    return catalogue


def _add_deltas(
    store: Store, catalogue: Catalogue, versions: Iterable[int], present: dict[str, ObjectInfo], fetchers: Executor
) -> None:
    run_id = catalogue.positions[0].run_id
    for manifest, body in bounded_map(fetchers, lambda v: _manifest_or_none(store, v), versions, ahead=AHEAD):
        if manifest is None or manifest.run_id != run_id:
            continue
        before = catalogue.positions.get(manifest.version - 1)
        step = before.step if before is not None else None
        catalogue.newest = max(catalogue.newest, manifest.version)
        catalogue.attempts[manifest.version] = manifest.attempt
        catalogue.positions[manifest.version] = position_after(manifest, body, earlier_step=step)
        keys = [(manifest.key(s), s.size_bytes) for s in manifest.segments]
        if before is not None and _follows(manifest, before) and _complete(keys, present):
            catalogue.manifests[manifest.version] = manifest
            size = len(body) + sum(s.size_bytes for s in manifest.segments)
            catalogue.edges.append(Edge("delta", before.version, manifest.version, size))


def _add_folds(
    store: Store,
    catalogue: Catalogue,
    ends: Iterable[tuple[int, int]],
    present: dict[str, ObjectInfo],
    fetchers: Executor,
) -> None:
    known = catalogue.positions
    wanted = [e for e in sorted(ends) if e[0] in known and e[1] in known]
    for found in bounded_map(fetchers, lambda e: find_fold(store, known[0].run_id, *e), wanted, ahead=AHEAD):
        if found is None:
            continue
        fold, size = found
        first, last = fold.first.version, fold.last.version
        if fold.first != end_of(known[first]) or fold.last != end_of(known[last]):
            log.warning("%s/%s: does not fit the manifests and is left out", store.url, fold_key(first, last))
        elif _complete([(fold.key(s), s.size_bytes) for s in fold.segments], present):
            catalogue.folds[first, last] = fold
            catalogue.edges.append(Edge("fold", first, last, size + sum(s.size_bytes for s in fold.segments)))


def _add_snapshots(
    store: Store, catalogue: Catalogue, versions: Iterable[int], present: dict[str, ObjectInfo], fetchers: Executor
) -> None:
    known = catalogue.positions
    wanted = [v for v in versions if v in known]
    for snapshot in bounded_map(fetchers, lambda v: _snapshot_or_none(store, known[0].run_id, v), wanted, ahead=AHEAD):
        if snapshot is None:
            continue
        position = known[snapshot.version]
        if (snapshot.sha256, snapshot.state) != (position.sha256, position.state):
            log.warning("%s: the snapshot of version %d is of another past", store.url, snapshot.version)
        elif _complete([(snapshot.key(f), f.size_bytes) for f in snapshot.files], present):
            catalogue.snapshots[snapshot.version] = snapshot
            catalogue.edges.append(Edge("snapshot", -1, snapshot.version, snapshot.size_bytes))


def end_of(position: Position) -> FoldEnd:
    """A position as one end of a fold."""
    return FoldEnd(version=position.version, sha256=position.sha256, state=position.state)


def find_fold(store: Store, run_id: str, first: int, last: int) -> tuple[Fold, int] | None:
    """A fold's manifest and its size; None if there is none, or if it is damaged, which is logged."""
    key = fold_key(first, last)
    try:
        found = store.get(key, limit_bytes=limits.MANIFEST_BYTES)
        assert found is not None
        fold = Fold.from_bytes(found.body, where=f"{store.url}/{key}")
    except NotFound:
        return None
    except CorruptObject as error:
        log.warning("a fold is left out: %s", error)
        return None
    if (fold.run_id, fold.first.version, fold.last.version) != (run_id, first, last):
        log.warning("%s/%s: is of another run or other versions and is left out", store.url, key)
        return None
    return fold, len(found.body)


def _follows(manifest: Manifest, position: Position) -> bool:
    try:
        check_follows(manifest, position)
    except ChainBroken as error:
        log.warning("a version is left out: %s", error)
        return False
    return True


def _manifest_or_none(store: Store, version: int) -> tuple[Manifest | None, bytes]:
    try:
        return read_manifest(store, version)
    except CorruptObject as error:
        log.warning("a manifest is left out: %s", error)
        return None, b""


def _snapshot_or_none(store: Store, run_id: str, version: int) -> Snapshot | None:
    try:
        return find_snapshot(store, run_id, version)
    except CorruptObject as error:
        log.warning("a snapshot is left out: %s", error)
        return None


def _complete(objects: Iterable[tuple[str, int]], present: dict[str, ObjectInfo]) -> bool:
    return all(key in present and present[key].size_bytes == size for key, size in objects)
