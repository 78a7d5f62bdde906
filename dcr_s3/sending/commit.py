"""Creates a manifest and settles what came of it."""

from __future__ import annotations

import logging

from dcr_s3.errors import (
    CommitConflict,
    CorruptObject,
    DcrError,
    Fenced,
    NotFound,
    PreconditionFailed,
    StoreUnavailable,
    UnknownOutcome,
)
from dcr_s3.format import limits
from dcr_s3.format.keys import manifest_key
from dcr_s3.format.manifest import Manifest
from dcr_s3.protocol.commit import Outcome, settle
from dcr_s3.store.base import Store
from dcr_s3.store.trusted import as_stored
from dcr_s3.world import world

log = logging.getLogger(__name__)

TRIES = 5


def commit(store: Store, manifest: Manifest) -> bytes:
    """Creates the manifest; returns its bytes once it is proved to be there.

    Raises ``CommitConflict`` or ``Fenced`` if another sender's manifest is proved to be there, ``UnknownOutcome`` if
    neither can be proved: then the version may or may not be committed, and only reopening the run tells.
    """
    key = manifest_key(manifest.version)
    body = as_stored(store, manifest.to_bytes())
    for attempt in range(TRIES):
        try:
            store.put(key, bytearray(body), if_absent=True)
            return body
        except PreconditionFailed:
            pass
        except StoreUnavailable as error:
            log.warning("%s: the store did not confirm the commit (%s); reading it back", key, error)
        found = _read_back(store, key)
        outcome = settle(body, found)
        if outcome is Outcome.COMMITTED:
            return body
        if outcome is Outcome.CONFLICT:
            raise _lost(key, manifest, found or b"")
        # The same conditional create may be repeated: whichever copy arrives first is this manifest.
        world().sleep(0.2 * 2**attempt)
    raise UnknownOutcome(
        f"{key}: {store.url} does not say whether version {manifest.version} was committed; reopen the run to find out"
    )


def _read_back(store: Store, key: str) -> bytes | None:
    try:
        found = store.get(key, limit_bytes=limits.MANIFEST_BYTES)
    except (NotFound, StoreUnavailable):
        return None
    return found.body if found is not None else None


def _lost(key: str, mine: Manifest, found: bytes) -> DcrError:
    try:
        other = Manifest.from_bytes(found, where=key)
    except CorruptObject as error:
        return error
    if other.epoch > mine.epoch:
        return Fenced(
            f"{key}: a newer sender has taken over the run (epoch {other.epoch} after {mine.epoch}); this one must stop"
        )
    return CommitConflict(
        f"{key}: another sender committed version {mine.version} first; open the run again to publish on top of it"
    )
