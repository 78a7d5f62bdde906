"""A mirror: the canonical bits of one version, and how they move to the next one without ever being lost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from tempfile import TemporaryDirectory

from dcr_s3.delta import TensorKey, digest_range, tensor_key
from dcr_s3.errors import StateMismatch
from dcr_s3.format.cells import Cells
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.limits import BLOCK_DENSE_BYTES
from dcr_s3.format.region import Region
from dcr_s3.format.run import TensorSpec
from dcr_s3.protocol.position import Position
from dcr_s3.targets.checkpoint import Checkpoint, describe, match_checkpoint
from dcr_s3.targets.files import SourceFile, state_files
from dcr_s3.targets.redo import Journal, RedoRecord, RedoWriter, apply_record, read_redo
from dcr_s3.workers import Progress, bounded_map, no_progress
from dcr_s3.world import world


class Mirror(ABC):
    """Cells by tensor number, in the order of the run's table.

    A change of version is staged in redo files, made final by :meth:`advance`, and may be interrupted anywhere.
    """

    def __init__(self, specs: Sequence[TensorSpec], position: Position, digests: Sequence[StateDigest]) -> None:
        self.specs = tuple(specs)
        self.keys = [tensor_key(s.name, s.type, s.shape) for s in self.specs]
        self.position = position
        self.digests = list(digests)

    @abstractmethod
    def copies(self, number: int) -> Sequence[Cells]:
        """Every place that stores tensor ``number``: one array, or several where tied names are stored apart."""

    def cells(self, number: int) -> Cells:
        """Tensor ``number`` as flat cells."""
        return self.copies(number)[0]

    def held_cells(self, number: int) -> int:
        """Cells of tensor ``number`` that are kept here: all of them, unless this is one owner's share."""
        return self.specs[number].cells

    def gather(self, region: Region) -> Cells:
        """A region's cells, flat, in its order; perhaps a view."""
        return region.gather(self.cells(region.tensor))

    def overwrite(self, record: RedoRecord) -> None:
        """Writes the cells that a redo record names."""
        apply_record(record, self.copies)

    @property
    @abstractmethod
    def workspace(self) -> Path:
        """A directory beside the cells for what is being fetched; what a crash leaves there is swept."""

    @abstractmethod
    def files(self) -> list[SourceFile]:
        """The state as the files of a checkpoint directory. They change with the mirror."""

    def redo(self, name: str) -> RedoWriter:
        """A new redo file for this mirror; it means nothing until given to :meth:`advance`."""
        return RedoWriter(self.workspace / f"{name}.redo")

    @abstractmethod
    def advance(
        self, target: Position, redo: Sequence[Journal], digests: Sequence[StateDigest], executor: Executor
    ) -> None:
        """Moves to ``target`` by overwriting the staged cells.

        The caller has proved that this gives ``target.state``.
        """

    @abstractmethod
    def flush(self) -> None:
        """Makes the cells durable, where they are kept on disk."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of files and locks."""

    def apply_files(self, paths: Sequence[Path], executor: Executor) -> None:
        """Overwrites what the journals say, in their order."""
        for path in paths:
            if path.is_dir():
                self._apply_state(path, executor)
                continue
            for _ in bounded_map(executor, self._apply_record, read_redo(path), ahead=32):
                pass

    def _apply_record(self, record: RedoRecord) -> None:
        world().reach("apply")
        self.overwrite(record)

    def _apply_state(self, directory: Path, executor: Executor) -> None:
        """Overwrites every cell with those of a checkpoint directory."""
        source = [copies[0] for copies in match_checkpoint(Checkpoint.open(directory), self.specs)]
        step_bytes = BLOCK_DENSE_BYTES

        def one(place: tuple[int, int]) -> None:
            number, start = place
            world().reach("apply")
            end = start + step_bytes // source[number].itemsize
            for cells in self.copies(number):
                cells[start:end] = source[number][start:end]

        places = ((n, s) for n, c in enumerate(source) for s in range(0, c.size, step_bytes // c.itemsize))
        for _ in bounded_map(executor, one, places, ahead=32):
            pass


class PassingMirror(Mirror):
    """A mirror of which nothing survives the process: its redo files are in a temporary directory."""

    def __init__(self, specs: Sequence[TensorSpec], position: Position, digests: Sequence[StateDigest]) -> None:
        super().__init__(specs, position, digests)
        self._staging = TemporaryDirectory(prefix="dcr-redo-")

    @property
    def workspace(self) -> Path:
        return Path(self._staging.name)

    def advance(
        self, target: Position, redo: Sequence[Journal], digests: Sequence[StateDigest], executor: Executor
    ) -> None:
        for writer in redo:
            writer.close()
        self.apply_files([w.path for w in redo], executor)
        self.position, self.digests = target, list(digests)
        for writer in redo:
            writer.discard()

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._staging.cleanup()


class MemoryMirror(PassingMirror):
    """Cells in RAM, for a sender that was opened from a state dict."""

    def __init__(
        self, specs: Sequence[TensorSpec], position: Position, digests: Sequence[StateDigest], cells: Sequence[Cells]
    ) -> None:
        super().__init__(specs, position, digests)
        self._cells = [[c] for c in cells]

    def copies(self, number: int) -> Sequence[Cells]:
        return self._cells[number]

    def files(self) -> list[SourceFile]:
        return state_files(self.specs, self.cells)


def measure(
    cells: Mapping[int, Cells] | Sequence[Cells],
    keys: Sequence[TensorKey],
    executor: Executor,
    *,
    stage: str = "verify",
    progress: Progress = no_progress,
) -> list[StateDigest]:
    """Digest of every tensor, from all of its cells, in pieces of a block's size over the executor."""
    jobs = [
        (number, start, start + BLOCK_DENSE_BYTES // cells[number].itemsize)
        for number in range(len(keys))
        for start in range(0, cells[number].size, BLOCK_DENSE_BYTES // cells[number].itemsize)
    ]
    total = sum(cells[n].nbytes for n in range(len(keys)))
    digests = [StateDigest()] * len(keys)
    done = 0

    def one(job: tuple[int, int, int]) -> tuple[int, int, StateDigest]:
        number, start, end = job
        piece = cells[number][start:end]
        return number, piece.nbytes, digest_range(keys[number], start, piece)

    for number, size, digest in bounded_map(executor, one, jobs, ahead=64):
        digests[number] += digest
        done += size
        progress(stage, done, total)
    return digests


def total(digests: Sequence[StateDigest]) -> StateDigest:
    """The state digest of a whole state."""
    result = StateDigest()
    for digest in digests:
        result += digest
    return result


def verify_mirror(mirror: Mirror, executor: Executor, progress: Progress = no_progress) -> StateDigest:
    """Recomputes everything. Raises ``StateMismatch`` naming the tensors whose bits are not those of the version."""
    for copy in range(max(len(mirror.copies(n)) for n in range(len(mirror.specs)))):
        cells = [mirror.copies(n)[min(copy, len(mirror.copies(n)) - 1)] for n in range(len(mirror.specs))]
        found = measure(cells, mirror.keys, executor, progress=progress)
        if total(found).hex() != mirror.position.state:
            wrong = [s.name for s, a, b in zip(mirror.specs, found, mirror.digests, strict=True) if a != b]
            raise StateMismatch(
                f"version {mirror.position.version}: {describe(wrong) or 'the state'} does not hold the committed bits"
            )
    return total(found)
