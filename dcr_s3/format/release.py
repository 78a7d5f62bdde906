"""`release.json`: the newest version that every required receiver has proved. It only moves forward."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from dcr_s3.format import limits
from dcr_s3.format.document import HEX_32, HEX_64, Document


class Release(Document):
    """Moved by compare-and-set. ``sha256`` is of the version's manifest (of ``run.json`` for version 0), ``proved_by``
    names the receivers that held the version when it was released.
    """

    MAGIC: ClassVar[str] = "dcr_s3/release"
    magic: Literal["dcr_s3/release"] = "dcr_s3/release"

    run_id: str = Field(pattern=HEX_32)
    version: int = Field(ge=0, le=limits.VERSION)
    sha256: str = Field(pattern=HEX_64)
    state: str = Field(pattern=HEX_32)
    step: int | None = None
    released_at: str = Field(max_length=40)
    proved_by: tuple[str, ...] = Field((), max_length=100_000)
