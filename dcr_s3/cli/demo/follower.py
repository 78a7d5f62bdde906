"""A receiver in a process of its own: follows a run and says, for every version, when it had it and what bits that is.

``python -m dcr_s3.cli.demo.follower RUN DIR`` writes one JSON object per line. It ends when its standard input closes,
so that it cannot outlive the process that started it.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from dcr_s3.cli.demo.bits import checkpoint_bits
from dcr_s3.errors import DcrError
from dcr_s3.reports import PullReport

_POLL_INTERVAL_S = 0.2


def main(url: str, directory: Path) -> None:
    """Follows until standard input closes. A line is ``{"report": .., "bits": ..}`` or, last, ``{"error": ..}``."""
    from dcr_s3 import Receiver

    stop = threading.Event()

    def wait_for_hang_up() -> None:
        sys.stdin.buffer.read()
        stop.set()

    def on_pull(report: PullReport) -> None:
        print(json.dumps({"report": report.model_dump(mode="json"), "bits": checkpoint_bits(directory)}), flush=True)

    threading.Thread(target=wait_for_hang_up, daemon=True).start()
    try:
        Receiver(url, directory, name=directory.name).follow(on_pull, stop, poll_interval_s=_POLL_INTERVAL_S)
    except DcrError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
