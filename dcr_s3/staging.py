"""Decoded segments that wait for the rest of their version. They outlive their process, so that little is fetched
twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field, ValidationError

from dcr_s3.delta.account import TensorChange
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.document import HEX_32, HEX_64, Part
from dcr_s3.protocol.position import Position
from dcr_s3.targets.redo import NOTE_SUFFIX, Journal, RedoFile, RedoWriter
from dcr_s3.world import world

log = logging.getLogger(__name__)


@dataclass
class Staged:
    """One decoded segment: its redo file and what it does to the state digest."""

    key: str
    sha256: str
    size_bytes: int
    redo: Journal
    changes: list[TensorChange] = field(default_factory=list)
    changed_cells: int = 0

    def discard(self) -> None:
        """Drops it."""
        self.hand_over()
        self.redo.discard()

    def hand_over(self) -> None:
        """From now on the redo file is the mirror's, which deletes it when it needs it no more."""
        world().unlink(self.redo.path.with_suffix(NOTE_SUFFIX))


class _Note(Part):
    """A staged segment beside its redo file. It holds for one position, and until the machine starts anew: the redo
    file was not made durable.
    """

    key: str
    sha256: str = Field(pattern=HEX_64)
    size_bytes: int
    redo_bytes: int
    changed_cells: int
    changes: tuple[tuple[int, str, str], ...]
    position: str = Field(pattern=HEX_64)
    state: str = Field(pattern=HEX_32)
    boot_id: str


def keep(staged: Staged, redo: RedoWriter, position: Position) -> None:
    """Leaves a note by which :func:`kept` finds a segment that was staged at ``position``."""
    redo.flush()
    note = _Note(
        key=staged.key,
        sha256=staged.sha256,
        size_bytes=staged.size_bytes,
        redo_bytes=redo.size_bytes,
        changed_cells=staged.changed_cells,
        changes=tuple((c.tensor, c.old.hex(), c.new.hex()) for c in staged.changes),
        position=position.sha256,
        state=position.state,
        boot_id=world().boot_id(),
    )
    path = redo.path.with_suffix(NOTE_SUFFIX)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(note.model_dump_json())
    world().replace(temporary, path)


def kept(workspace: Path, position: Position) -> Iterator[Staged]:
    """What an earlier process staged at ``position``. Notes of anything else are deleted."""
    for path in sorted(workspace.glob(f"*{NOTE_SUFFIX}")):
        redo = RedoFile(path.with_suffix(".redo"))
        note = _read(path)
        fits = note is not None and (note.position, note.state) == (position.sha256, position.state)
        if note is None or not fits or note.boot_id != world().boot_id() or redo.size_bytes != note.redo_bytes:
            # Only the note: the redo file may be one that the mirror's state names. If not, the mirror sweeps it.
            world().unlink(path)
            continue
        log.info("%s: was fetched before and is used again", note.key)
        changes = [TensorChange(n, StateDigest.from_hex(a), StateDigest.from_hex(b)) for n, a, b in note.changes]
        yield Staged(note.key, note.sha256, note.size_bytes, redo, changes, note.changed_cells)


def _read(path: Path) -> _Note | None:
    try:
        return _Note.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
