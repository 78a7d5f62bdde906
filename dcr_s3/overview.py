"""What a bucket says about a run: its versions, its receivers, and what one version is made of. Reads only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from hashlib import sha256

from pydantic import BaseModel

from dcr_s3.errors import BadInput, CorruptObject, NotFound
from dcr_s3.format import limits
from dcr_s3.format.ack import Ack
from dcr_s3.format.keys import (
    ACK_PREFIX,
    FOLD_PREFIX,
    MANIFEST_PREFIX,
    SNAPSHOT_MARKER,
    SNAPSHOT_PREFIX,
    fold_versions,
    manifest_key,
    manifest_version,
    segment_key,
)
from dcr_s3.format.manifest import Manifest, SegmentEntry
from dcr_s3.format.release import Release
from dcr_s3.format.run import Run
from dcr_s3.format.segment import PREFIX_BYTES, TRAILER_BYTES, Segment, parse_segment
from dcr_s3.joint import read_release
from dcr_s3.reading import load_run
from dcr_s3.store.base import Store

_READERS = 8
_BUSIEST = 10


class VersionSummary(BaseModel):
    """One version. ``wire_bytes`` counts segments and manifest, ``dense_bytes`` a full copy."""

    version: int
    kind: str
    step: int | None
    epoch: int
    created_at: str
    changed_elements: int
    total_elements: int
    wire_bytes: int
    dense_bytes: int
    segments: int


class ReceiverSummary(BaseModel):
    """What a receiver last proved. ``lag`` counts versions; ``matches`` is None if its version was not read.

    Its lease runs until ``lease_until``; ``alive`` is False where the store has dated something later than that.
    """

    name: str
    version: int
    lag: int
    proved_at: str
    matches: bool | None
    lease_s: int
    lease_until: str
    alive: bool


class ReleaseSummary(BaseModel):
    """The released version, and who had proved it when it was released. ``lag`` counts versions."""

    version: int
    step: int | None
    lag: int
    released_at: str
    proved_by: list[str]


class Overview(BaseModel):
    """A run. ``version`` is the newest; ``versions`` has the last ones, oldest first. ``folds`` are pairs: from which
    version to which. ``release`` is None where nothing was released yet.
    """

    run_id: str
    created_at: str
    coding: str
    tensors: int
    total_elements: int
    dense_bytes: int
    version: int
    snapshots: list[int]
    folds: list[tuple[int, int]]
    release: ReleaseSummary | None
    versions: list[VersionSummary]
    receivers: list[ReceiverSummary]


class SegmentSummary(BaseModel):
    key: str
    size_bytes: int
    blocks: int
    changed_elements: int


class CodingSummary(BaseModel):
    """All blocks of one coding. ``dense_bytes`` is what they cover, ``payload_bytes`` what they take."""

    coding: str
    blocks: int
    changed_elements: int
    dense_bytes: int
    payload_bytes: int


class PlaceSummary(BaseModel):
    """Changes in one tensor, or in the several small ones that share a block."""

    first_tensor: str
    tensors: int
    changed_elements: int
    elements: int
    payload_bytes: int


class Anatomy(BaseModel):
    """What one version consists of. ``busiest`` has the places with the most changes, most first."""

    version: int
    kind: str
    step: int | None
    epoch: int
    attempt: str
    created_at: str
    writer: str
    parent_sha256: str
    manifest_sha256: str
    state_before: str
    state_after: str
    changed_elements: int
    total_elements: int
    dense_bytes: int
    manifest_bytes: int
    wire_bytes: int
    tensors_touched: int
    segments: list[SegmentSummary]
    codings: list[CodingSummary]
    busiest: list[PlaceSummary]


def overview(store: Store, *, last: int = 20) -> Overview:
    """Reads a run's newest ``last`` versions, its release and all acknowledgements.

    Raises ``RunMissing``, ``CorruptObject``.
    """
    run, _ = load_run(store)
    listed = [(v, o.modified_at) for o in store.list(MANIFEST_PREFIX) if (v := manifest_version(o.key)) is not None]
    newest = max((v for v, _ in listed), default=0)
    held = list(store.list(ACK_PREFIX))
    with ThreadPoolExecutor(_READERS) as readers:
        read = list(readers.map(lambda version: _read_manifest(store, version), sorted(v for v, _ in listed)[-last:]))
        acks = list(readers.map(lambda o: _read_ack(store, o.key), held))
    states = {0: run.state} | {manifest.version: manifest.state_after for manifest, _ in read}
    now = max((at for at in (*(t for _, t in listed), *(o.modified_at for o in held))), default=0.0)
    released = read_release(store, run.run_id)
    return Overview(
        run_id=run.run_id,
        created_at=run.created_at,
        coding=run.coding,
        tensors=len(run.tensors),
        total_elements=run.total_elements,
        dense_bytes=run.dense_bytes,
        version=newest,
        snapshots=[int(key.split("/")[1]) for key in _markers(store)],
        folds=sorted(ends for o in store.list(FOLD_PREFIX) if (ends := fold_versions(o.key)) is not None),
        release=None if released is None else _release_summary(released[0], newest),
        versions=[_summary(manifest, len(body)) for manifest, body in read],
        receivers=[
            _receiver_summary(ack, info.modified_at, now, newest, states)
            for ack, info in zip(acks, held, strict=True)
            if ack is not None and ack.run_id == run.run_id
        ],
    )


def _receiver_summary(ack: Ack, seen_at: float, now: float, newest: int, states: Mapping[int, str]) -> ReceiverSummary:
    return ReceiverSummary(
        name=ack.receiver,
        version=ack.version,
        lag=newest - ack.version,
        proved_at=ack.proved_at,
        matches=ack.state == states[ack.version] if ack.version in states else None,
        lease_s=ack.lease_s,
        lease_until=datetime.fromtimestamp(seen_at + ack.lease_s, UTC).isoformat(timespec="seconds"),
        alive=now < seen_at + ack.lease_s,
    )


def _release_summary(release: Release, newest: int) -> ReleaseSummary:
    return ReleaseSummary(
        version=release.version,
        step=release.step,
        lag=newest - release.version,
        released_at=release.released_at,
        proved_by=list(release.proved_by),
    )


def anatomy(store: Store, version: int | None = None) -> Anatomy:
    """Takes one version (None: the newest) apart, reading segment indexes but no payload.

    Raises ``BadInput`` for a version that does not exist, ``CorruptObject`` for damage in what is read.
    """
    run, _ = load_run(store)
    if version is None:
        listed = (manifest_version(o.key) for o in store.list(MANIFEST_PREFIX))
        version = max((v for v in listed if v is not None), default=0)
    if version < 1:
        raise BadInput(
            f"{store.url}: version {version} is the base, or no version: only versions from 1 can be inspected"
        )
    manifest, body = _read_manifest(store, version)
    with ThreadPoolExecutor(_READERS) as readers:
        segments = list(readers.map(lambda entry: _read_index(store, manifest, entry), manifest.segments))
    return Anatomy(
        version=manifest.version,
        kind=manifest.kind,
        step=manifest.step,
        epoch=manifest.epoch,
        attempt=manifest.attempt,
        created_at=manifest.created_at,
        writer=manifest.writer,
        parent_sha256=manifest.parent.sha256,
        manifest_sha256=sha256(body).hexdigest(),
        state_before=manifest.state_before,
        state_after=manifest.state_after,
        changed_elements=manifest.statistics.changed_elements,
        total_elements=manifest.statistics.total_elements,
        dense_bytes=manifest.statistics.dense_bytes,
        manifest_bytes=len(body),
        wire_bytes=len(body) + manifest.statistics.segment_bytes,
        tensors_touched=sum(last - first + 1 for first, last in manifest.touched),
        segments=[
            SegmentSummary(
                key=segment_key(manifest.version, manifest.attempt, entry.owner, entry.seq),
                size_bytes=entry.size_bytes,
                blocks=len(segment.blocks),
                changed_elements=sum(b.changed for b in segment.blocks),
            )
            for entry, segment in zip(manifest.segments, segments, strict=True)
        ],
        codings=_codings(segments),
        busiest=_busiest(run, segments),
    )


def _read_manifest(store: Store, version: int) -> tuple[Manifest, bytes]:
    key = manifest_key(version)
    try:
        found = store.get(key, limit_bytes=limits.MANIFEST_BYTES)
    except NotFound:
        raise BadInput(f"{store.url}: no version {version} (no {key})") from None
    assert found is not None
    return Manifest.from_bytes(found.body, where=f"{store.url}/{key}"), found.body


def _read_ack(store: Store, key: str) -> Ack | None:
    try:
        found = store.get(key, limit_bytes=limits.ACK_BYTES)
    except NotFound:
        return None  # deleted since it was listed
    assert found is not None
    return Ack.from_bytes(found.body, where=f"{store.url}/{key}")


def _markers(store: Store) -> list[str]:
    return [o.key for o in store.list(SNAPSHOT_PREFIX) if o.key.endswith(f"/{SNAPSHOT_MARKER}")]


def _summary(manifest: Manifest, manifest_bytes: int) -> VersionSummary:
    return VersionSummary(
        version=manifest.version,
        kind=manifest.kind,
        step=manifest.step,
        epoch=manifest.epoch,
        created_at=manifest.created_at,
        changed_elements=manifest.statistics.changed_elements,
        total_elements=manifest.statistics.total_elements,
        wire_bytes=manifest.statistics.segment_bytes + manifest_bytes,
        dense_bytes=manifest.statistics.dense_bytes,
        segments=len(manifest.segments),
    )


def _read_index(store: Store, manifest: Manifest, entry: SegmentEntry) -> Segment:
    """A segment's header and index. The payloads between them are neither read nor given memory."""
    key = segment_key(manifest.version, manifest.attempt, entry.owner, entry.seq)
    body = memoryview(bytearray(entry.size_bytes))
    head_bytes = min(entry.size_bytes, PREFIX_BYTES + limits.SEGMENT_HEADER_BYTES)
    tail_bytes = min(entry.size_bytes, entry.index_bytes + TRAILER_BYTES)
    try:
        store.read_into(key, 0, body[:head_bytes])
        store.read_into(key, entry.size_bytes - tail_bytes, body[entry.size_bytes - tail_bytes :])
    except NotFound:
        raise CorruptObject(
            f"{store.url}/{key}: the manifest of version {manifest.version} names it, but it is gone"
        ) from None
    index = body[entry.size_bytes - tail_bytes : entry.size_bytes - TRAILER_BYTES]
    if sha256(index).hexdigest() != entry.index_sha256:
        raise CorruptObject(f"{store.url}/{key}: its index does not have the digest that the manifest names")
    return parse_segment(body, where=f"{store.url}/{key}")


def _codings(segments: Iterable[Segment]) -> list[CodingSummary]:
    found: dict[str, CodingSummary] = {}
    for block in (b for segment in segments for b in segment.blocks):
        name = block.coding.name.lower().replace("_", "-")
        new = CodingSummary(coding=name, blocks=0, changed_elements=0, dense_bytes=0, payload_bytes=0)
        entry = found.setdefault(name, new)
        entry.blocks += 1
        entry.changed_elements += block.changed
        entry.dense_bytes += block.dense_bytes
        entry.payload_bytes += block.size_bytes
    return [found[name] for name in sorted(found)]


def _busiest(run: Run, segments: Iterable[Segment]) -> list[PlaceSummary]:
    found: dict[tuple[int, ...], PlaceSummary] = {}
    for block in (b for segment in segments for b in segment.blocks if b.changed):
        numbers = tuple(sorted({region.tensor for region in block.regions}))
        if numbers[-1] >= len(run.tensors):
            raise CorruptObject(
                f"a block of this version names tensor {numbers[-1]}; the run has {len(run.tensors)} tensors"
            )
        first = run.tensors[numbers[0]].name
        new = PlaceSummary(first_tensor=first, tensors=len(numbers), changed_elements=0, elements=0, payload_bytes=0)
        entry = found.setdefault(numbers, new)
        entry.changed_elements += block.changed
        entry.elements += block.cells
        entry.payload_bytes += block.size_bytes
    return sorted(found.values(), key=lambda place: -place.changed_elements)[:_BUSIEST]
