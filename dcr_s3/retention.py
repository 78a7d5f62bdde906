"""Retention: deletes what no receiver that may exist needs, and what nobody will ever commit. Lists by default only."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Executor
from dataclasses import dataclass

from pydantic import BaseModel

from dcr_s3.catalogue import Catalogue, read_catalogue
from dcr_s3.errors import BadInput, CorruptObject, DcrError, NotFound
from dcr_s3.format.keys import (
    FOLD_PREFIX,
    MANIFEST_PREFIX,
    OWNER_PREFIX,
    SEGMENT_PREFIX,
    SNAPSHOT_PREFIX,
    Place,
    attempt_epoch,
    fold_key,
    fold_versions,
    manifest_key,
    manifest_version,
    place_of,
    snapshot_marker_key,
    snapshot_version,
)
from dcr_s3.joint import Roster, read_release
from dcr_s3.protocol.membership import living
from dcr_s3.protocol.plan import Edge
from dcr_s3.protocol.position import Position
from dcr_s3.protocol.retention import needed
from dcr_s3.reading import load_run
from dcr_s3.store.base import AbandonedUpload, ObjectInfo, Store
from dcr_s3.workers import make_executor

log = logging.getLogger(__name__)

MIN_AGE_S = 86_400.0
KEEP_VERSIONS = 16
_BATCH = 1000


class Doomed(BaseModel):
    """One object (or unfinished upload, of unknown size) and why nobody needs it."""

    key: str
    size_bytes: int
    why: str


class GcReport(BaseModel):
    """What was, or would be, deleted. ``held`` are the versions of living receivers."""

    newest: int
    deleted: bool
    objects: list[Doomed]
    uploads: list[Doomed]
    size_bytes: int
    held: dict[str, int]


@dataclass(frozen=True)
class _Facts:
    """Everything the decisions are made from. ``now`` and ages are by the store's clock."""

    catalogue: Catalogue
    listed: dict[str, ObjectInfo]
    now: float
    min_age_s: float
    needed: frozenset[Edge]
    keep_committed: bool

    @property
    def newest(self) -> int:
        return self.catalogue.newest

    def is_old(self, modified_at: float) -> bool:
        return modified_at + self.min_age_s <= self.now


def gc(
    store: Store,
    *,
    min_age_s: float = MIN_AGE_S,
    keep_versions: int = KEEP_VERSIONS,
    uncommitted_only: bool = False,
    dry_run: bool = True,
    workers: int | None = None,
) -> GcReport:
    """Deletes objects of a run that nobody needs any more; with ``dry_run`` (the default) only says which.

    Never deleted: the run, manifests, acknowledgements, the release; anything younger than ``min_age_s`` by the store's
    clock, which should be longer than any upload or pull takes; the last ``keep_versions`` deltas; the cheapest way to
    the newest and to the released version for every living receiver and for a new one, and all that comes after the
    snapshot which a new one begins with; anything at all while there is no snapshot. ``uncommitted_only`` looks at
    leftovers of attempts alone. Raises ``CorruptObject`` and deletes nothing if a manifest cannot be read.
    """
    if min_age_s < 0 or keep_versions < 1:
        raise BadInput("a minimum age is not negative, and at least one version is kept")
    run, start = load_run(store)
    with make_executor(workers, "gc") as executor:
        # Ages count from before anything else is read: what comes meanwhile is young, however long the rest may take.
        listed = _list(store, executor)
        members = Roster(store, run.run_id).members()
        now = max([o.modified_at for o in listed.values()] + [m.seen_at for m in members], default=0.0)
        catalogue = read_catalogue(store, start, start, executor)
        for version in (v for v in map(manifest_version, listed) if v is not None):
            if version not in catalogue.positions and version <= catalogue.newest:
                raise CorruptObject(f"{store.url}/{manifest_key(version)}: cannot be read, so nothing is deleted")
        alive = living(members, now)
        released = read_release(store, run.run_id)
        wanted = {catalogue.newest, *([released[0].version] if released else [])}
        old = [e for e in catalogue.edges if _marker(e) in listed and listed[_marker(e)].modified_at + min_age_s <= now]
        stays = needed(catalogue.edges, old, [m.version for m in alive], wanted, keep_versions)
        facts = _Facts(catalogue, listed, now, min_age_s, frozenset(stays), uncommitted_only)
        objects = [Doomed(key=o.key, size_bytes=o.size_bytes, why=why) for o, why in _doomed_objects(facts)]
        uploads = list(_doomed_uploads(store, facts))
        if not dry_run:
            _delete(store, [o.key for o in objects], [u for u, _ in uploads])
    return GcReport(
        newest=catalogue.newest,
        deleted=not dry_run,
        objects=objects,
        uploads=[Doomed(key=u.key, size_bytes=0, why=why) for u, why in uploads],
        size_bytes=sum(o.size_bytes for o in objects),
        held={m.name: m.version for m in alive},
    )


def _list(store: Store, executor: Executor) -> dict[str, ObjectInfo]:
    prefixes = (MANIFEST_PREFIX, SEGMENT_PREFIX, OWNER_PREFIX, FOLD_PREFIX, SNAPSHOT_PREFIX)
    pages = executor.map(lambda prefix: list(store.list(prefix)), prefixes)
    return {o.key: o for page in pages for o in page}


def _marker(edge: Edge) -> str:
    """The document that made an edge exist."""
    if edge.kind == "fold":
        return fold_key(edge.first, edge.last)
    return snapshot_marker_key(edge.last) if edge.kind == "snapshot" else manifest_key(edge.last)


def _doomed_objects(facts: _Facts) -> Iterator[tuple[ObjectInfo, str]]:
    """Markers come before what they name, so that an interrupted deletion leaves nothing that looks complete."""
    stay = {(e.kind, e.first, e.last) for e in facts.needed}
    later: list[tuple[ObjectInfo, str]] = []
    for info in facts.listed.values():
        if not facts.is_old(info.modified_at):
            continue
        place = place_of(info.key)
        if place is not None:
            why = _why_uncommitted(place, facts)
            if why is None and not facts.keep_committed:
                why = _why_unneeded(place, facts, stay)
            if why is not None:
                later.append((info, why))
        elif not facts.keep_committed and (why := _why_marker(info.key, stay)) is not None:
            yield info, why
    yield from later


def _why_uncommitted(place: Place, facts: _Facts) -> str | None:
    """Why nobody will ever commit what lies there; None if it is committed or may still be."""
    catalogue = facts.catalogue
    if place.kind in ("segment", "owner"):
        committed = catalogue.attempts.get(place.last)
        if place.last <= catalogue.newest:
            return f"attempt at version {place.last} that lost" if place.folder != committed else None
        if attempt_epoch(place.folder) < catalogue.positions[catalogue.newest].epoch:
            return f"attempt at version {place.last} by a sender that was fenced"
        return None
    if place.kind == "fold":
        fold = catalogue.folds.get((place.first, place.last))
        marked = fold_key(place.first, place.last) in facts.listed
        unfinished = not marked if fold is None else fold.attempt != place.folder
        return f"unfinished fold of {place.first} to {place.last}" if unfinished else None
    snapshot = catalogue.snapshots.get(place.last)
    marked = snapshot_marker_key(place.last) in facts.listed
    unfinished = not marked if snapshot is None else snapshot.folder != place.folder
    return f"unfinished snapshot of version {place.last}" if unfinished else None


def _why_unneeded(place: Place, facts: _Facts, stay: AbstractSet[tuple[str, int, int]]) -> str | None:
    if place.kind == "owner":
        return f"owner list of version {place.last}, which is committed" if place.last <= facts.newest else None
    kind = "delta" if place.kind == "segment" else place.kind
    if place.last > facts.newest or (kind, place.first, place.last) in stay:
        return None
    if kind == "delta":
        return f"version {place.last}: every receiver has a cheaper way"
    return _why_marker(_marker(Edge(kind, place.first, place.last, 0)), stay)


def _why_marker(key: str, stay: AbstractSet[tuple[str, int, int]]) -> str | None:
    if (ends := fold_versions(key)) is not None and ("fold", *ends) not in stay:
        return f"fold of {ends[0]} to {ends[1]}: on nobody's cheapest way"
    if (version := snapshot_version(key)) is not None and ("snapshot", -1, version) not in stay:
        return f"snapshot of version {version}: a newer one serves"
    return None


def _doomed_uploads(store: Store, facts: _Facts) -> Iterator[tuple[AbandonedUpload, str]]:
    first = min((o.modified_at for o in facts.listed.values()), default=facts.now)
    for prefix in (SEGMENT_PREFIX, FOLD_PREFIX, SNAPSHOT_PREFIX):
        for upload in store.list_uploads(prefix):
            place = place_of(upload.key)
            if place is None or not facts.is_old(upload.started_at):
                continue
            why = _why_uncommitted(place, facts)
            # Some stores do not date uploads; what claims to be older than the run says nothing.
            if why is not None and (place.kind == "segment" or upload.started_at >= first):
                yield upload, why


def sweep_uploads(store: Store, position: Position, min_age_s: float) -> int:
    """Drops uploads that senders began before the fence of ``position`` and neither finished nor dropped, if older than
    ``min_age_s`` by the store's clock; returns how many. What it is not allowed or able to do is logged.

    One LIST, and one HEAD where there are any.
    """
    try:
        fenced = [u for u in store.list_uploads(SEGMENT_PREFIX) if _is_fenced(u, position)]
        now = store.head(manifest_key(position.version)).modified_at if fenced else 0.0
        old = [u for u in fenced if u.started_at + min_age_s <= now]
        for upload in old:
            upload.abort()
    except (DcrError, NotFound) as error:
        log.info("%s: uploads of earlier senders were not looked for (%s)", store.url, error)
        return 0
    return len(old)


def _is_fenced(upload: AbandonedUpload, position: Position) -> bool:
    place = place_of(upload.key)
    return place is not None and attempt_epoch(place.folder) < position.epoch


def _delete(store: Store, keys: Sequence[str], uploads: Iterable[AbandonedUpload]) -> None:
    for start in range(0, len(keys), _BATCH):
        store.delete(keys[start : start + _BATCH])
    for upload in uploads:
        upload.abort()
