"""Makes a run ready for its first version."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from dcr_s3.format.run import Run
from dcr_s3.format.signature import Signer
from dcr_s3.sending.baseline import open_baseline
from dcr_s3.sending.create import Base, create_run, read_base
from dcr_s3.snapshots import find_snapshot, upload_snapshot
from dcr_s3.store import Store, open_store
from dcr_s3.targets.checkpoint import Checkpoint
from dcr_s3.targets.files import directory_files, state_files
from dcr_s3.workers import Progress, make_executor, no_progress


def init_run(
    url: str | Store,
    base: Base,
    *,
    upload_base: bool = False,
    context: bool = True,
    state_dir: Path | None = None,
    signer: Signer | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Run:
    """Creates a run from ``base``, a checkpoint directory or a state dict; the same base again finds the same run.

    A directory is also copied to ``state_dir``, as the baseline of whoever publishes from this machine. With
    ``upload_base`` it is put into the bucket, so that receivers need nothing but the address. ``context`` chooses the
    smaller coding, for receivers that keep a mirror. ``signer`` signs the run. Raises ``RunExists`` if the address
    holds another run.
    """
    report = progress or no_progress
    with ExitStack() as stack:
        store = open_store(url, signer=signer)
        if isinstance(url, str):
            stack.callback(store.close)
        executor = stack.enter_context(make_executor(workers, "init"))
        tensors = read_base(base)
        run, start = create_run(store, tensors, context=context, executor=executor, progress=report)
        if isinstance(base, Mapping):
            cells = {t.name: t.cells for t in tensors}
            files = state_files(run.tensors, lambda number: cells[run.tensors[number].name])
        else:
            open_baseline(store, run, start, Path(base), tensors, state_dir, executor=executor, progress=report).close()
            files = directory_files(Checkpoint.open(Path(base)))
        if upload_base and find_snapshot(store, run.run_id, 0) is None:
            upload_snapshot(store, start, files, executor, report)
    return run
