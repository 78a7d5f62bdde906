"""Publishes for minutes through a bad network to a real S3 server that is restarted now and then, receivers following.

A few requests in a hundred are refused (503), cut short, or lose their reply. No error may reach the sender or a
receiver, every version must arrive at every receiver, and every mirror must have the published bits in the end.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dcr_s3.receiver import Receiver, verify_directory
from dcr_s3.reports import PullReport
from dcr_s3.sender import Sender
from dcr_s3.testing.chaos_model import ChaosModel
from dcr_s3.testing.faults import FaultKind, FaultPlan
from dcr_s3.testing.proxy import FaultyProxy
from dcr_s3.testing.servers import SeaweedServer

BUCKET = "soak"
KINDS = (FaultKind.UNAVAILABLE, FaultKind.SHORT_BODY, FaultKind.LOST_REPLY)
DOWN_S = 2.0
PACE_S = 0.25
PATIENCE_S = 180.0
"""After the last version: longer than any follower waits between two looks."""


@dataclass
class Figures:
    """What happened. ``most_behind`` is the largest lag of a receiver behind the sender, in versions, and
    ``longest_s`` the longest time from commit to proven bits; ``warnings`` counts what was logged and waited out.
    """

    versions: int = 0
    receivers: int = 0
    restarts: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    missing: int = 0
    mismatches: int = 0
    most_behind: int = 0
    longest_s: float = 0.0
    warnings: int = 0
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """No error, nothing lost, all mirrors equal."""
        return not (self.errors or self.missing or self.mismatches)


class _Follower:
    """A receiver in a thread of its own, and what it was told."""

    def __init__(self, url: str, model: ChaosModel, directory: Path) -> None:
        self.directory = directory
        self.pulled: list[tuple[int, float]] = []
        self.error: BaseException | None = None
        self.stop = threading.Event()
        self._receiver = Receiver(url, directory, base=model.directory(0), name=directory.name)
        self._thread = threading.Thread(target=self._follow, name=directory.name)
        self._thread.start()

    @property
    def version(self) -> int:
        """The newest version that it holds."""
        return self.pulled[-1][0] if self.pulled else 0

    def close(self) -> None:
        """Ends it."""
        self.stop.set()
        self._thread.join()

    def _follow(self) -> None:
        try:
            self._receiver.follow(self._pulled, self.stop, poll_interval_s=0.25)
        except BaseException as error:
            self.error = error

    def _pulled(self, report: PullReport) -> None:
        # Catching up after an outage may lead over several versions at once.
        self.pulled.extend((version, time.time()) for version in range(report.from_version + 1, report.version + 1))


class _Warnings(logging.Handler):
    """Counts what the package logs as a warning."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.levelno >= logging.WARNING


def soak(
    seconds: float, *, restarts: int, receivers: int = 2, rate: float = 0.01, seed: int = 0, size_bytes: int = 4 << 20
) -> Figures:
    """Publishes for so many seconds; the server is restarted ``restarts`` times, evenly spread.

    ``rate``: the share of requests that goes wrong. Environment variables for S3 are changed.
    """
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dcr-soak-")))
        server = stack.enter_context(SeaweedServer())
        server.create_bucket(BUCKET)
        plan = FaultPlan(seed=seed, rate=rate, kinds=KINDS)
        proxy = stack.enter_context(FaultyProxy(server.endpoint_url, plan))
        os.environ.update({**server.environment, "AWS_ENDPOINT_URL_S3": proxy.endpoint_url})
        warnings = _Warnings()
        logging.getLogger("dcr_s3").addHandler(warnings)
        stack.callback(logging.getLogger("dcr_s3").removeHandler, warnings)
        figures = _run(f"s3://{BUCKET}/run", root, server, seconds, restarts, receivers, seed, size_bytes)
        figures.faults = dict(Counter(str(one.kind) for one in plan.struck))
        figures.warnings = warnings.count
        return figures


def _run(
    url: str,
    root: Path,
    server: SeaweedServer,
    seconds: float,
    restarts: int,
    receivers: int,
    seed: int,
    size_bytes: int,
) -> Figures:
    figures = Figures(receivers=receivers, restarts=restarts)
    model = ChaosModel(root / "model", seed, size_bytes)
    begun = time.monotonic()
    restarter = threading.Thread(target=_restart, args=(server, seconds, restarts))
    committed: dict[int, float] = {}
    followers: list[_Follower] = []
    try:
        with Sender.open(url, base=model.directory(0), state_dir=root / "state") as sender:
            followers = [_Follower(url, model, root / f"receiver-{n}") for n in range(receivers)]
            restarter.start()
            while time.monotonic() - begun < seconds:
                model.step()
                report = sender.publish(model.directory(model.newest), step=model.newest)
                committed[report.version] = report.committed_at
                behind = [report.version - f.version for f in followers]
                figures.most_behind = max(figures.most_behind, *behind)
                time.sleep(PACE_S)
    except Exception as error:
        figures.errors.append(f"sender: {type(error).__name__}: {error}")
    restarter.join()
    figures.versions = len(committed)
    newest = max(committed, default=0)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and any(f.version < newest and f.error is None for f in followers):
        time.sleep(0.1)
    figures.seconds = round(time.monotonic() - begun, 1)
    for follower in followers:
        follower.close()
        _judge(url, follower, model, committed, figures)
    return figures


def _judge(url: str, follower: _Follower, model: ChaosModel, committed: dict[int, float], figures: Figures) -> None:
    """Adds one receiver's errors, lag, and whether all versions came and its bits are right."""
    if follower.error is not None:
        figures.errors.append(f"{follower.directory.name}: {type(follower.error).__name__}: {follower.error}")
    at = dict(follower.pulled)
    figures.missing += len(committed.keys() - at.keys())
    waited = [at[version] - moment for version, moment in committed.items() if version in at]
    figures.longest_s = round(max([figures.longest_s, *waited]), 2)
    equal = model.holds(model.newest, follower.directory)
    figures.mismatches += not (equal and verify_directory(url, follower.directory).version == max(committed))


def _restart(server: SeaweedServer, seconds: float, restarts: int) -> None:
    begun = time.monotonic()
    for number in range(restarts):
        time.sleep(max(0.0, begun + seconds * (number + 1) / (restarts + 1) - time.monotonic()))
        server.restart(DOWN_S)


def main() -> int:
    """Returns 1 where anything went wrong."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--restarts", type=int, default=2, help="of the server, evenly spread")
    parser.add_argument("--receivers", type=int, default=2)
    parser.add_argument("--rate", type=float, default=0.01, help="share of the requests that goes wrong")
    parser.add_argument("--seed", type=int, default=0, help="decides which requests")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    figures = soak(
        60 * arguments.minutes,
        restarts=arguments.restarts,
        receivers=arguments.receivers,
        rate=arguments.rate,
        seed=arguments.seed,
    )
    result = asdict(figures)
    print(json.dumps(result) if arguments.json else "\n".join(f"{k}: {v}" for k, v in result.items()))
    return int(not figures.good)


if __name__ == "__main__":
    sys.exit(main())
