"""Leads a target over versions that a fold covers: their manifests are copied, their segments are not."""

from __future__ import annotations

from dcr_s3.catalogue import end_of, find_fold
from dcr_s3.errors import ChainBroken, NotFound
from dcr_s3.format import limits
from dcr_s3.format.keys import FOLD_PREFIX, fold_versions, manifest_key
from dcr_s3.protocol.chain import read_next
from dcr_s3.protocol.position import Position
from dcr_s3.store.base import Store


def widest_fold(source: Store, position: Position) -> int | None:
    """The last version of the fold that leads farthest on from ``position``; None without one over several versions."""
    ends = [e for e in (fold_versions(o.key) for o in source.list(FOLD_PREFIX)) if e is not None]
    for first, last in sorted(ends, reverse=True):
        if first != position.version or last < first + 2:
            continue
        found = find_fold(source, position.run_id, first, last)
        if found is not None and found[0].first == end_of(position):
            return last
    return None


def read_manifests(source: Store, position: Position, last: int) -> tuple[dict[str, bytes], Position]:
    """The manifests after ``position`` up to ``last`` by key, in order, and where they lead. Raises ``ChainBroken``."""
    bodies: dict[str, bytes] = {}
    while position.version < last:
        key = manifest_key(position.version + 1)
        try:
            found = source.get(key, limit_bytes=limits.MANIFEST_BYTES)
        except NotFound:
            raise ChainBroken(f"{source.url}/{key}: is missing, though a fold leads over it") from None
        assert found is not None
        _, position = read_next(position, found.body)
        bodies[key] = found.body
    return bodies, position
