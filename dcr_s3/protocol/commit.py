"""What a commit attempt came to. The reply to a conditional create never decides; what lies under the key does."""

from __future__ import annotations

from enum import Enum

from dcr_s3.format.manifest import Manifest


class Outcome(Enum):
    """*Committed* and *conflict* are proven; *unknown* means the key could not be read or is still empty."""

    COMMITTED = "committed"
    CONFLICT = "conflict"
    UNKNOWN = "unknown"


def settle(mine: Manifest, found: bytes | None) -> Outcome:
    """Outcome of creating ``mine``, by the object now under its key (None: no object)."""
    if found is None:
        return Outcome.UNKNOWN
    return Outcome.COMMITTED if found == mine.to_bytes() else Outcome.CONFLICT
