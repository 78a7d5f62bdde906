"""Pulling and following as commands do it: from cron, as a service, with metrics, from the nearest copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dcr_s3.cli.service import Notifier, WatchedStore, reload_by_event
from dcr_s3.errors import Busy, DcrError
from dcr_s3.format.ack import DEFAULT_LEASE_S
from dcr_s3.glance import glance, remember
from dcr_s3.metrics import Metrics, Role
from dcr_s3.receiver import Receiver
from dcr_s3.reports import PullReport
from dcr_s3.store import Store
from dcr_s3.store.nearby import open_nearest
from dcr_s3.workers import Progress


def pull_once(
    run: str,
    directory: Path,
    *,
    base: Path | None,
    nearby: Sequence[str],
    to_version: int | None,
    skip_busy: bool,
    progress: Progress,
    released_only: bool = False,
) -> PullReport | None:
    """One pull, which costs one request where nothing is new; None if another process is at work on the directory and
    ``skip_busy`` says that this is as good."""
    with closing(open_nearest(run, nearby)) as store:
        found = glance(store, directory) if to_version is None else None
        if found is not None:
            return found
        try:
            receiver = Receiver(store, directory, base=base, released_only=released_only, progress=progress)
            report = receiver.pull(to_version=to_version)
        except Busy:
            if skip_busy:
                return None
            raise
        remember(directory, report, for_s=DEFAULT_LEASE_S / 3)
        return report


@contextmanager
def measured(run: str, role: Role, textfile: Path | None) -> Iterator[Metrics]:
    """Metrics of the block, written to ``textfile`` at its end whatever it came to."""
    metrics = Metrics(run, role)
    try:
        yield metrics
    except DcrError as error:
        metrics.fail(error)
        raise
    finally:
        if textfile is not None:
            metrics.write(textfile)


@dataclass(frozen=True)
class Following:
    """What ``follow`` was told, whatever is kept up to date."""

    run: str
    base: Path | None
    nearby: tuple[str, ...]
    released_only: bool
    name: str | None
    acknowledge: bool
    until_version: int | None
    poll_interval_s: float
    stop: threading.Event


OnPull = Callable[[PullReport], None]
Stretch = Callable[[Store, OnPull, Progress], None]
"""Follows, reading from a store, until it is told to stop or has got where it should."""


def directory_stretch(wanted: Following, directory: Path) -> Stretch:
    """Keeps a directory up to date."""

    def stretch(store: Store, on_pull: OnPull, progress: Progress) -> None:
        receiver = directory_receiver(wanted, directory, store, progress)
        receiver.follow(
            on_pull, wanted.stop, until_version=wanted.until_version, poll_interval_s=wanted.poll_interval_s
        )

    return stretch


def directory_receiver(wanted: Following, directory: Path, store: Store, progress: Progress) -> Receiver:
    """The receiver that a directory is kept up to date by."""
    return Receiver(
        store,
        directory,
        base=wanted.base,
        name=wanted.name,
        acknowledge=wanted.acknowledge,
        released_only=wanted.released_only,
        progress=progress,
    )


def follow_as_service(wanted: Following, stretch: Stretch, *, on_pull: OnPull, progress: Progress) -> None:
    """Follows until stopped. SIGHUP ends what is in hand and begins anew, with credentials and profile read again.

    A service manager that listens is told of readiness, of each version, and that work goes on.
    """
    notifier = Notifier()

    def moved(stage: str, done_bytes: int, total_bytes: int) -> None:
        notifier.alive()
        progress(stage, done_bytes, total_bytes)

    def pulled(report: PullReport) -> None:
        notifier.status(f"holds version {report.version}")
        on_pull(report)

    again = True
    with reload_by_event(wanted.stop) as reload:
        while again:
            with closing(open_nearest(wanted.run, wanted.nearby)) as inner:
                notifier.ready()
                stretch(WatchedStore(inner, notifier.alive), pulled, moved)
            again = reload.is_set()
            if again:
                notifier.reloading()
                reload.clear()
                wanted.stop.clear()
    notifier.stopping()
