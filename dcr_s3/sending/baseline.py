"""The sender's baseline: a mirror of the newest committed version, in a local directory or in RAM."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path

from dcr_s3.errors import RunExists
from dcr_s3.format.run import Run
from dcr_s3.mirroring import check_base, locate, measure_run, open_mirror
from dcr_s3.protocol.position import Position
from dcr_s3.sending.create import Base, BaseTensor
from dcr_s3.store.base import Store
from dcr_s3.targets.checkpoint import describe
from dcr_s3.targets.mirror import MemoryMirror, Mirror
from dcr_s3.workers import Progress


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
