"""A position: one version of one run, chained by digest to all before it."""

from __future__ import annotations

from pydantic import Field

from dcr_s3.format import limits
from dcr_s3.format.digest import sha256_hex
from dcr_s3.format.document import HEX_32, HEX_64, Part
from dcr_s3.format.run import Run


class Position(Part):
    """Where a mirror stands. ``sha256`` is of the version's manifest (of ``run.json`` for version 0)."""

    run_id: str = Field(pattern=HEX_32)
    version: int = Field(ge=0, le=limits.VERSION)
    sha256: str = Field(pattern=HEX_64)
    epoch: int = Field(ge=0, le=limits.EPOCH)
    state: str = Field(pattern=HEX_32)
    step: int | None = None
    next_attempt: str | None = None


def origin(run: Run, body: bytes) -> Position:
    """Version 0 of a run; ``body`` is the stored ``run.json``."""
    return Position(run_id=run.run_id, version=0, sha256=sha256_hex(body), epoch=0, state=run.state)
