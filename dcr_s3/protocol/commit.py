"""What a commit attempt came to. The reply to a conditional create never decides; what lies under the key does."""

from __future__ import annotations

from enum import Enum


class Outcome(Enum):
    """*Committed* and *conflict* are proven; *unknown* means the key could not be read or is still empty."""

    COMMITTED = "committed"
    CONFLICT = "conflict"
    UNKNOWN = "unknown"


def settle(mine: bytes, found: bytes | None) -> Outcome:
    """Outcome of creating the manifest ``mine``, by the object now under its key (None: no object). Its write id makes
    its bytes unlike any other manifest's.
    """
    if found is None:
        return Outcome.UNKNOWN
    return Outcome.COMMITTED if found == mine else Outcome.CONFLICT
