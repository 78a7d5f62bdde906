"""`snapshots/{version}/dcr_snapshot.json`: the marker that makes a full state complete. Created once, last."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from dcr_s3.format import limits
from dcr_s3.format.document import HEX_32, HEX_64, Document, Part
from dcr_s3.format.keys import FOLDER_PATTERN, is_plain_file_name, snapshot_key


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
    """A full state: the files of an ordinary checkpoint directory, in a folder that is its writer's own.

    ``sha256`` is of the version's manifest (of ``run.json`` for version 0).
    """

    MAGIC: ClassVar[str] = "dcr_s3/snapshot"
    magic: Literal["dcr_s3/snapshot"] = "dcr_s3/snapshot"

    run_id: str = Field(pattern=HEX_32)
    version: int = Field(ge=0, le=limits.VERSION)
    sha256: str = Field(pattern=HEX_64)
    state: str = Field(pattern=HEX_32)
    step: int | None = None
    folder: str = Field(pattern=FOLDER_PATTERN)
    files: tuple[SnapshotFile, ...] = Field(min_length=1, max_length=100_000)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(f.size_bytes for f in self.files)

    def key(self, file: SnapshotFile) -> str:
        """Where one of the files lies."""
        return snapshot_key(self.version, self.folder, file.name)

    @model_validator(mode="after")
    def _names(self) -> Self:
        if len({f.name for f in self.files}) != len(self.files):
            raise ValueError("a file stands twice")
        return self
