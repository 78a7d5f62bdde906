"""`owners/{version}/{attempt}/{owner}.json`: what one rank of a trainer adds to a version, or why it cannot."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from dcr_s3.format import limits
from dcr_s3.format.document import HEX_32, Document
from dcr_s3.format.keys import ATTEMPT_PATTERN
from dcr_s3.format.manifest import SegmentEntry


class OwnerList(Document):
    """One owner's finished share of an attempt; the manifest is made of all of them.

    With ``error`` the attempt has failed; owner 0's says so to all others. It decides nothing once a manifest exists.
    """

    MAGIC: ClassVar[str] = "dcr_s3/owner"
    magic: Literal["dcr_s3/owner"] = "dcr_s3/owner"

    run_id: str = Field(pattern=HEX_32)
    version: int = Field(ge=1, le=limits.VERSION)
    attempt: str = Field(pattern=ATTEMPT_PATTERN)
    owner: int = Field(ge=0, lt=limits.OWNERS)
    segments: tuple[SegmentEntry, ...] = Field((), max_length=limits.SEGMENTS_PER_VERSION)
    gain: str = Field("0" * 32, pattern=HEX_32)
    """State digest of the new bits less that of the old ones."""
    touched: tuple[tuple[int, int], ...] = ()
    """Numbers of the tensors with changes, as inclusive ranges in order."""
    changed_elements: int = Field(0, ge=0)
    error: str | None = Field(None, max_length=2000)
