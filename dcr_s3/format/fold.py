"""`folds/{first}-{last}.json`: one delta that leads over several versions at once. A shortcut only."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from dcr_s3.format import limits
from dcr_s3.format.document import HEX_32, HEX_64, Document, Part
from dcr_s3.format.keys import ATTEMPT_PATTERN, fold_segment_key
from dcr_s3.format.manifest import SegmentEntry, Statistics, check_segments


class FoldEnd(Part):
    """One end: a version, the SHA-256 of its manifest (of `run.json` for version 0), and its state."""

    version: int = Field(ge=0, le=limits.VERSION)
    sha256: str = Field(pattern=HEX_64)
    state: str = Field(pattern=HEX_32)


class Fold(Document):
    """The changes from ``first`` to ``last``; cells that changed back are not in it. Created once, after its segments.

    Segments are coded against the bits of ``first``; their headers name version ``last``.
    """

    MAGIC: ClassVar[str] = "dcr_s3/fold"
    magic: Literal["dcr_s3/fold"] = "dcr_s3/fold"

    run_id: str = Field(pattern=HEX_32)
    first: FoldEnd
    last: FoldEnd
    attempt: str = Field(pattern=ATTEMPT_PATTERN)
    created_at: str = Field(max_length=40)
    segments: tuple[SegmentEntry, ...] = Field((), max_length=limits.SEGMENTS_PER_VERSION)
    statistics: Statistics

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.first.version >= self.last.version:
            raise ValueError(f"leads from version {self.first.version} to {self.last.version}")
        if not self.segments and self.first.state != self.last.state:
            raise ValueError("the state changes but there are no segments")
        check_segments(self.segments)
        return self

    def key(self, segment: SegmentEntry) -> str:
        """Where one of the segments lies."""
        return fold_segment_key(self.first.version, self.last.version, self.attempt, segment.owner, segment.seq)
