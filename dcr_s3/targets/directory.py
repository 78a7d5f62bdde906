"""A mirror kept in a checkpoint directory, with a redo journal and a state file that says what the directory holds."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path

from filelock import FileLock, Timeout

from dcr_s3.errors import BadInput, Busy, CorruptObject
from dcr_s3.format.cells import Cells
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.run import Run
from dcr_s3.protocol.position import Position
from dcr_s3.targets.checkpoint import Checkpoint, match_checkpoint
from dcr_s3.targets.disk import disk_errors
from dcr_s3.targets.files import SourceFile, directory_files
from dcr_s3.targets.mirror import Mirror
from dcr_s3.targets.redo import NOTE_SUFFIX, Journal, remove_directory
from dcr_s3.targets.state import WORK_DIR, MirrorState, read_state, write_durably, write_state
from dcr_s3.workers import InlineExecutor
from dcr_s3.world import world

JOURNAL_BYTES = 1 << 30
JOURNALS = 64
"""A journal of more bytes or files is not kept for a better moment to make the cells durable."""


class DirectoryMirror(Mirror):
    """Memory-mapped safetensors files that this process alone changes (a lock file sees to it)."""

    def __init__(
        self, directory: Path, run: Run, state: MirrorState, digests: Sequence[StateDigest], lock: FileLock
    ) -> None:
        super().__init__(run.tensors, state.position, digests)
        self.directory = directory
        self._lock = lock
        self._state = state
        self._checkpoint = Checkpoint.open(directory, writable=True)
        self._copies = match_checkpoint(self._checkpoint, run.tensors)

    @classmethod
    def open(cls, directory: Path, run: Run) -> DirectoryMirror:
        """Opens a mirror of ``run`` and finishes what an interrupted process left.

        Raises ``BadInput`` if the directory is no mirror or mirrors another run, ``Busy`` if another process has it.
        """
        lock = acquire(directory)
        try:
            state = read_state(directory)
            if state is None:
                raise BadInput(f"{directory}: is no mirror (it has no dcr_state.json)")
            if state.position.run_id != run.run_id:
                raise BadInput(
                    f"{directory}: mirrors run {state.position.run_id}, not {run.run_id}; use another directory"
                )
            digests = _read_digests(directory, (state.target or state.position).version, len(run.tensors))
            mirror = cls(directory, run, state, digests, lock)
            mirror._recover()
        except BaseException:
            lock.release()
            raise
        return mirror

    @classmethod
    def adopt(
        cls, directory: Path, run: Run, position: Position, digests: Sequence[StateDigest], lock: FileLock
    ) -> DirectoryMirror:
        """Makes a checkpoint directory, whose bits the caller has proved to be ``position``'s, a mirror."""
        _write_digests(directory, position.version, digests)
        state = MirrorState(version=position.version, status="clean", position=position, boot_id=world().boot_id())
        write_state(directory, state)
        return cls(directory, run, state, digests, lock)

    def copies(self, number: int) -> Sequence[Cells]:
        return self._copies[number]

    @property
    def workspace(self) -> Path:
        return self.directory / WORK_DIR

    def files(self) -> list[SourceFile]:
        return directory_files(self._checkpoint)

    def advance(
        self, target: Position, redo: Sequence[Journal], digests: Sequence[StateDigest], executor: Executor
    ) -> None:
        with disk_errors(self.directory):
            for writer in redo:
                writer.close()
            _write_digests(self.directory, target.version, digests)
            names = (*self._state.journals, *(w.path.name for w in redo))
            self._write("applying", target=target, journals=names)
        self.apply_files([w.path for w in redo], executor)
        self.position, self.digests = target, list(digests)
        self._write("clean", journals=names)
        self._sweep()
        if len(names) > JOURNALS or sum(_size(self.workspace / name) for name in names) > JOURNAL_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes the cells to disk, after which the journal is no longer needed."""
        if self._state.journals:
            self._checkpoint.flush()
            self._write("clean", journals=())
            self._sweep()

    def close(self) -> None:
        self._lock.release()

    def _write(self, status: str, *, target: Position | None = None, journals: Sequence[str]) -> None:
        self._state = MirrorState.model_validate(
            {
                "magic": MirrorState.MAGIC,
                "version": self.position.version,
                "status": status,
                "position": self.position,
                "target": target,
                "journals": tuple(journals),
                "boot_id": world().boot_id(),
            }
        )
        write_state(self.directory, self._state)

    def _recover(self) -> None:
        """Repeats the journal if a change was cut short, or if cells may have been lost with the machine."""
        state = self._state
        # A state file that a power loss may still take back must not decide what is deleted.
        world().sync_directory(self.directory)
        if state.journals and (state.status == "applying" or state.boot_id != world().boot_id()):
            self.apply_files([self.directory / WORK_DIR / name for name in state.journals], InlineExecutor())
            self.position = state.target or state.position
            self._write("clean", journals=state.journals)
        elif state.status == "applying":
            self.position = state.target or state.position
            self._write("clean", journals=())
        self._sweep()

    def _sweep(self) -> None:
        """Deletes journals and digests that the state does not name, but for segments that a note keeps."""
        keep = {*self._state.journals, _digests_name(self.position.version)}
        for pattern in ("*.redo", "digests-*"):
            for path in sorted((self.directory / WORK_DIR).glob(pattern)):
                if path.name not in keep and not path.with_suffix(NOTE_SUFFIX).exists():
                    world().unlink(path)
        for path in sorted(self.workspace.glob("*.state")):
            if path.name not in keep:
                remove_directory(path)


def acquire(directory: Path) -> FileLock:
    """The directory's lock. Raises ``Busy`` if another process holds it."""
    with disk_errors(directory):
        (directory / WORK_DIR).mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory / WORK_DIR / "lock", thread_local=False)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise Busy(f"{directory}: another process is using this directory; wait for it or stop it") from None
    return lock


def _size(journal: Path) -> int:
    return sum(file.stat().st_size for file in (journal.iterdir() if journal.is_dir() else [journal]))


def _digests_name(version: int) -> str:
    return f"digests-{version:012d}"


def _write_digests(directory: Path, version: int, digests: Sequence[StateDigest]) -> None:
    body = b"".join(struct.pack("<QQ", d.low, d.high) for d in digests)
    write_durably(directory / WORK_DIR / _digests_name(version), body)


def _read_digests(directory: Path, version: int, count: int) -> list[StateDigest]:
    path = directory / WORK_DIR / _digests_name(version)
    body = path.read_bytes() if path.is_file() else b""
    if len(body) != 16 * count:
        raise CorruptObject(
            f"{path}: missing or damaged; delete dcr_state.json and pull again to adopt the directory anew"
        )
    return [StateDigest(*pair) for pair in struct.iter_unpack("<QQ", body)]
