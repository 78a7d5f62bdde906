"""What publishing, pulling and verifying tell their caller."""

from __future__ import annotations

from pydantic import BaseModel


class Report(BaseModel):
    """Common part. Elements are cells; ``seconds`` gives busy time by stage, and ``total``."""

    version: int
    step: int | None = None
    changed_elements: int = 0
    total_elements: int
    wire_bytes: int = 0
    """All bytes moved for the version, manifest included."""
    dense_bytes: int
    """Bytes of one full copy."""
    seconds: dict[str, float] = {}


class PublishReport(Report):
    """One published version."""

    segments: int = 0
    requests: int = 0
    """Requests to the store, all kinds."""
    committed_at: float = 0.0
    """Wall clock of this machine just after the commit, seconds since the epoch."""


class PullReport(Report):
    """One pull: from ``from_version`` to ``version``, perhaps over several versions."""

    from_version: int
    up_to_date: bool
    """True where there was nothing to do."""
    applied_at: float = 0.0
    """Wall clock of this machine just after the last version was in place, seconds since the epoch."""


class VerifyReport(BaseModel):
    """A full comparison of a directory's bits with the run."""

    version: int
    state_digest: str
    tensors: int
    dense_bytes: int
    seconds: float
