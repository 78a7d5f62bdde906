"""`dcr_state.json`: what a mirror directory holds, for us after a crash and for anyone who opens the directory."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from dcr_s3.format.document import Document
from dcr_s3.protocol.position import Position
from dcr_s3.targets.disk import disk_errors
from dcr_s3.world import world

STATE_FILE = "dcr_state.json"
WORK_DIR = ".dcr"


class MirrorState(Document):
    """``position`` is what the files hold while ``status`` is *clean*; while *applying* they are between it and
    ``target``.

    ``journals`` are the redo files whose cells may not have reached the disk, oldest first; replaying them in order
    after a crash gives ``position`` (or ``target``) again.
    """

    MAGIC: ClassVar[str] = "dcr_s3/mirror"
    magic: Literal["dcr_s3/mirror"] = "dcr_s3/mirror"

    version: int
    status: Literal["clean", "applying"]
    position: Position
    target: Position | None = None
    journals: tuple[str, ...] = ()
    boot_id: str = Field("", max_length=64)


def read_state(directory: Path) -> MirrorState | None:
    """The state of a mirror directory, None if it is no mirror. Raises ``CorruptObject`` if the file is damaged."""
    try:
        body = (directory / STATE_FILE).read_bytes()
    except FileNotFoundError:
        return None
    return MirrorState.from_bytes(body, where=str(directory / STATE_FILE))


def write_state(directory: Path, state: MirrorState) -> None:
    """Replaces the state file, durably and at once."""
    write_durably(directory / STATE_FILE, state.to_bytes())


def write_durably(path: Path, body: bytes) -> None:
    """Writes a file so that after a crash it is either the old one or the new one. Raises ``DiskFull``."""
    temporary = path.with_name(path.name + ".tmp")
    with disk_errors(path):
        with temporary.open("wb") as handle:
            handle.write(body)
            world().sync(handle)
        world().replace(temporary, path)
        world().sync_directory(path.parent)
