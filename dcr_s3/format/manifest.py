"""`manifests/{version}.json`: one version. Creating it is the commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from dcr_s3.format import limits
from dcr_s3.format.document import HEX_32, HEX_64, Document, Part
from dcr_s3.format.keys import ATTEMPT_PATTERN, segment_key


class Parent(Part):
    """The version before, and the SHA-256 of its manifest (of `run.json` for version 0)."""

    version: int = Field(ge=0, le=limits.VERSION)
    sha256: str = Field(pattern=HEX_64)


class SegmentEntry(Part):
    """One segment of the version. Its key follows from version, attempt, owner and seq."""

    owner: int = Field(ge=0, lt=limits.OWNERS)
    seq: int = Field(ge=0, lt=limits.SEGMENTS_PER_VERSION)
    size_bytes: int = Field(gt=0, le=limits.SEGMENT_BYTES)
    sha256: str = Field(pattern=HEX_64)
    index_bytes: int = Field(gt=0, le=limits.INDEX_BYTES)
    index_sha256: str = Field(pattern=HEX_64)


def check_segments(segments: Sequence[SegmentEntry]) -> None:
    """Raises ValueError unless they are in order of owner and seq, each once."""
    places = [(s.owner, s.seq) for s in segments]
    if places != sorted(set(places)):
        raise ValueError("segments are not in order of owner and seq, each once")


class Statistics(Part):
    """Figures for people and planners; nothing is decided by them."""

    total_elements: int = Field(ge=0)
    changed_elements: int = Field(ge=0)
    dense_bytes: int = Field(ge=0)
    segment_bytes: int = Field(ge=0)


class Manifest(Document):
    """One committed version.

    ``next_attempt`` tells receivers where this sender will write the next version's segments.
    """

    MAGIC: ClassVar[str] = "dcr_s3/manifest"
    magic: Literal["dcr_s3/manifest"] = "dcr_s3/manifest"

    run_id: str = Field(pattern=HEX_32)
    version: int = Field(ge=1, le=limits.VERSION)
    kind: Literal["delta", "fence"]
    parent: Parent
    epoch: int = Field(ge=0, le=limits.EPOCH)
    write_id: str = Field(pattern=HEX_32)
    attempt: str = Field(pattern=ATTEMPT_PATTERN)
    next_attempt: str | None = Field(None, pattern=ATTEMPT_PATTERN)
    created_at: str = Field(max_length=40)
    step: int | None = None
    state_before: str = Field(pattern=HEX_32)
    state_after: str = Field(pattern=HEX_32)
    segments: tuple[SegmentEntry, ...] = Field((), max_length=limits.SEGMENTS_PER_VERSION)
    touched: tuple[tuple[int, int], ...] = ()
    """Numbers of the tensors with changes, as inclusive ranges in order."""
    statistics: Statistics

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.parent.version != self.version - 1:
            raise ValueError(f"version {self.version} names parent {self.parent.version}")
        if self.kind == "fence" and (self.segments or self.state_before != self.state_after):
            raise ValueError("a fence changes nothing")
        if not self.segments and self.state_before != self.state_after:
            raise ValueError("the state changes but there are no segments")
        check_segments(self.segments)
        return self

    def key(self, segment: SegmentEntry) -> str:
        """Where one of the segments lies."""
        return segment_key(self.version, self.attempt, segment.owner, segment.seq)
