"""Where a relay's target stands, and documents that are written there once."""

from __future__ import annotations

from collections.abc import Sequence

from dcr_s3.errors import ChainBroken, NotFound, PreconditionFailed, RunExists, RunMissing
from dcr_s3.format import limits
from dcr_s3.format.digest import sha256_hex
from dcr_s3.format.keys import MANIFEST_PREFIX, RUN_KEY, manifest_key, manifest_version
from dcr_s3.format.manifest import Manifest
from dcr_s3.format.run import Run
from dcr_s3.protocol.position import Position, origin
from dcr_s3.store.base import Store


def read_run(source: Store) -> tuple[Run, Position, bytes]:
    """The run, its version 0, and the bytes of its document. Raises ``RunMissing``."""
    try:
        found = source.get(RUN_KEY, limit_bytes=limits.RUN_BYTES)
    except NotFound:
        raise RunMissing(f"{source.url}: no run here (no {RUN_KEY}); check the address") from None
    assert found is not None
    run = Run.from_bytes(found.body, where=f"{source.url}/{RUN_KEY}")
    return run, origin(run, found.body), found.body


def target_position(source: Store, target: Store, run: Run, start: Position, body: bytes) -> Position:
    """Where a target stands, after the run itself is there; the run's oldest version if it is empty.

    Raises ``RunExists`` if the target holds another run.
    """
    put_once(target, RUN_KEY, body, RunExists)
    offered = _versions(source)
    held = _unbroken(_versions(target), offered)
    if held is not None and (not offered or held + 1 >= offered[0]):
        found = target.get(manifest_key(held), limit_bytes=limits.MANIFEST_BYTES)
        assert found is not None
        return _after(Manifest.from_bytes(found.body, where=f"{target.url}/{manifest_key(held)}"), found.body)
    if not offered or offered[0] == 1:
        return start
    key = manifest_key(offered[0])
    found = source.get(key, limit_bytes=limits.MANIFEST_BYTES)
    assert found is not None
    oldest = Manifest.from_bytes(found.body, where=f"{source.url}/{key}")
    return Position(
        run_id=run.run_id,
        version=oldest.parent.version,
        sha256=oldest.parent.sha256,
        epoch=0,
        state=oldest.state_before,
    )


def _versions(store: Store) -> list[int]:
    return sorted(v for v in (manifest_version(o.key) for o in store.list(MANIFEST_PREFIX)) if v is not None)


def _unbroken(versions: Sequence[int], offered: Sequence[int]) -> int | None:
    """The newest version before a gap, which a relay leaves that dies while it follows a fold; None if that is at the
    very beginning."""
    if not versions or (offered and versions[0] > offered[0]):
        return None
    held = set(versions)
    return next(v for v in versions if v + 1 not in held)


def _after(manifest: Manifest, body: bytes) -> Position:
    return Position(
        run_id=manifest.run_id,
        version=manifest.version,
        sha256=sha256_hex(body),
        epoch=manifest.epoch,
        state=manifest.state_after,
        step=manifest.step,
        next_attempt=manifest.next_attempt,
    )


def put_once(store: Store, key: str, body: bytes, error: type[RunExists] | type[ChainBroken]) -> None:
    """Creates an object; the same bytes there already are as good, others raise ``error``."""
    try:
        store.put(key, bytearray(body), if_absent=True)
        return
    except PreconditionFailed:
        found = store.get(key, limit_bytes=limits.RUN_BYTES)
    if found is None or found.body != body:
        raise error(f"{store.url}/{key}: is not the source's; a relay needs an address of its own for each run")
