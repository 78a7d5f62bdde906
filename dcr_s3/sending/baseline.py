"""The sender's baseline: a mirror of the newest committed version, in a local directory or in RAM."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from pathlib import Path

from dcr_s3.errors import RunExists
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.run import Run
from dcr_s3.mirroring import check_base, locate, measure_run, open_mirror
from dcr_s3.protocol.position import Position
from dcr_s3.sending.create import Base, BaseTensor
from dcr_s3.store.base import Store
from dcr_s3.targets.checkpoint import describe
from dcr_s3.targets.mirror import MemoryMirror, Mirror
from dcr_s3.targets.redo import Journal
from dcr_s3.workers import Progress


class Baseline:
    """The mirror that a sender compares with, which follows each commit in the background.

    A version is published once its manifest is proved; to move the mirror there takes as long as the disk does, so
    that only who wants the cells next waits for it. Without threads in ``mover`` nothing is left for later.
    """

    def __init__(self, mirror: Mirror, mover: Executor, workers: Executor) -> None:
        self.position = mirror.position
        self._mirror = mirror
        self._mover = mover
        self._workers = workers
        self._moving: Future[None] | None = None

    def settled(self) -> Mirror:
        """The mirror, at ``position``. Raises what kept it from getting there, such as ``DiskFull``."""
        if self._moving is not None:
            self._moving.result()
        return self._mirror

    def advance(self, target: Position, redo: Sequence[Journal], digests: Sequence[StateDigest]) -> None:
        """Begins to move to ``target``, which is committed. Raises where it is known at once that it cannot."""
        self.settled()
        self.position = target
        self._moving = self._mover.submit(self._move, target, redo, digests)
        if self._moving.done():
            self.settled()

    def _move(self, target: Position, redo: Sequence[Journal], digests: Sequence[StateDigest]) -> None:
        try:
            self._mirror.advance(target, redo, digests, self._workers)
        except Exception as error:
            error.add_note(f"version {target.version} is committed; only this sender's baseline did not follow")
            raise


def default_state_dir() -> Path:
    """``$DCR_STATE_DIR``, or ``dcr_s3`` under ``$XDG_STATE_HOME``, or under ``~/.local/state``."""
    if named := os.environ.get("DCR_STATE_DIR"):
        return Path(named)
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "dcr_s3"


def open_baseline(
    store: Store,
    run: Run,
    start: Position,
    base: Base | None,
    tensors: Sequence[BaseTensor],
    state_dir: Path | None,
    *,
    executor: Executor,
    progress: Progress,
) -> Mirror:
    """A mirror in RAM for a base that is a state dict, else one in ``state_dir``; at whatever version it was left.

    ``tensors`` are the base's, empty without one. Raises ``BadInput`` if the base is of no version of the run.
    """
    if tensors and not isinstance(base, Path):
        return _memory_mirror(store, run, start, tensors, executor, progress)
    directory = (state_dir or default_state_dir()) / run.run_id / "baseline"
    existed = directory.exists()
    if base is not None and existed:
        assert isinstance(base, Path)
        check_base(run, start, store, base, executor, progress)
    directory.mkdir(parents=True, exist_ok=True)
    path = base if isinstance(base, Path) else None
    return open_mirror(store, run, start, directory, base=path, executor=executor, progress=progress)


def _memory_mirror(
    store: Store, run: Run, start: Position, tensors: Sequence[BaseTensor], executor: Executor, progress: Progress
) -> Mirror:
    here = {t.name: t for t in tensors}
    differing = [
        s.name
        for s in run.tensors
        if s.name not in here or (here[s.name].dtype.name, here[s.name].shape) != (s.dtype, s.shape)
    ] + sorted(here.keys() - {s.name for s in run.tensors})
    if differing:
        raise RunExists(f"{store.url}: holds a run with other tensors ({describe(differing)}); use another address")
    cells = [here[s.name].cells for s in run.tensors]
    digests = measure_run(run, cells, executor, progress)
    return MemoryMirror(run.tensors, locate(store, run, start, digests, what="the base"), digests, cells)
