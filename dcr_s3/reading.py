"""Reads a run's documents: the run, manifests, positions."""

from __future__ import annotations

from dcr_s3.errors import BadInput, CorruptObject, NotFound, RunMissing
from dcr_s3.format import limits
from dcr_s3.format.keys import RUN_KEY, manifest_key
from dcr_s3.format.manifest import Manifest
from dcr_s3.format.run import Run
from dcr_s3.protocol.chain import position_after, read_next
from dcr_s3.protocol.position import Position, origin
from dcr_s3.store.base import Store


def load_run(store: Store) -> tuple[Run, Position]:
    """The run at a store's address and its version 0. Raises ``RunMissing``."""
    try:
        found = store.get(RUN_KEY, limit_bytes=limits.RUN_BYTES)
    except NotFound:
        raise RunMissing(
            f"{store.url}: no run here (no {RUN_KEY}); check the address, or create it with `dcr-s3 init`"
        ) from None
    assert found is not None
    run = Run.from_bytes(found.body, where=f"{store.url}/{RUN_KEY}")
    return run, origin(run, found.body)


def is_committed(store: Store, version: int) -> bool:
    """Whether a version's manifest is there; one request without a body."""
    try:
        store.head(manifest_key(version))
    except NotFound:
        return False
    return True


def fetch_manifest(store: Store, position: Position) -> tuple[Manifest, Position, int] | None:
    """The manifest after ``position``, where it leads, and its size; None if that version is not committed yet."""
    try:
        found = store.get(manifest_key(position.version + 1), limit_bytes=limits.MANIFEST_BYTES)
    except NotFound:
        return None
    assert found is not None
    manifest, target = read_next(position, found.body)
    return manifest, target, len(found.body)


def read_manifest(store: Store, version: int) -> tuple[Manifest, bytes]:
    """One version's manifest by itself. Raises ``BadInput`` if that version is not committed, ``CorruptObject``."""
    key = manifest_key(version)
    try:
        found = store.get(key, limit_bytes=limits.MANIFEST_BYTES)
    except NotFound:
        raise BadInput(f"{store.url}: version {version} is not committed (no {key})") from None
    assert found is not None
    manifest = Manifest.from_bytes(found.body, where=f"{store.url}/{key}")
    if manifest.version != version:
        raise CorruptObject(f"{store.url}/{key}: says version {manifest.version}")
    return manifest, found.body


def read_position(store: Store, start: Position, version: int) -> Position:
    """Where version ``version`` of the run stands, by its manifest alone; ``start`` is version 0.

    Raises ``BadInput`` if it is not committed, ``CorruptObject`` if the manifest is of another run.
    """
    if version == 0:
        return start
    manifest, body = read_manifest(store, version)
    if manifest.run_id != start.run_id:
        where = f"{store.url}/{manifest_key(version)}"
        raise CorruptObject(f"{where}: belongs to run {manifest.run_id}, not to {start.run_id}")
    return position_after(manifest, body)
