"""`snapshots/{version}/dcr_snapshot.json`: the marker that makes a full state complete. Written after all its files."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from dcr_s3.format import limits
from dcr_s3.format.document import HEX_32, HEX_64, Document, Part
from dcr_s3.format.keys import is_plain_file_name


class SnapshotFile(Part):
    """One file of the checkpoint directory."""

    name: str
    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=HEX_64)

    @model_validator(mode="after")
    def _plain(self) -> Self:
        if not is_plain_file_name(self.name):
            raise ValueError(f"{self.name!r} is not a plain file name")
        return self


class Snapshot(Document):
    """A full state: the files of an ordinary checkpoint directory."""

    MAGIC: ClassVar[str] = "dcr_s3/snapshot"
    magic: Literal["dcr_s3/snapshot"] = "dcr_s3/snapshot"

    run_id: str = Field(pattern=HEX_32)
    version: int = Field(ge=0, le=limits.VERSION)
    state: str = Field(pattern=HEX_32)
    files: tuple[SnapshotFile, ...] = Field(min_length=1, max_length=100_000)
