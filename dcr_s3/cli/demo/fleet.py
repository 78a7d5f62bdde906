"""The demonstration's receivers, seen from the training process."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self

from dcr_s3.errors import StoreUnavailable
from dcr_s3.reports import PullReport

_END_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Arrival:
    """One pull of one receiver. ``bits`` is the digest of its mirror right after it."""

    report: PullReport
    bits: str


class Fleet:
    """Receiver processes, one per directory. Leaving the ``with`` block ends them all."""

    def __init__(self, url: str, directories: Sequence[Path]) -> None:
        self.names = [directory.name for directory in directories]
        self._arrivals: dict[str, list[Arrival]] = {name: [] for name in self.names}
        self._errors: list[str] = []
        self._changed = threading.Condition()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        for directory in directories:
            process = subprocess.Popen(
                [sys.executable, "-m", "dcr_s3.cli.demo.follower", url, str(directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is this process's to handle; it ends the others by closing their input
            )
            reader = threading.Thread(target=self._read, args=(directory.name, process), daemon=True)
            self._processes.append(process)
            self._readers.append(reader)
            reader.start()

    def _read(self, name: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said = json.loads(line)
            with self._changed:
                if "error" in said:
                    self._errors.append(f"receiver {name}: {said['error']}")
                else:
                    self._arrivals[name].append(Arrival(PullReport(**said["report"]), said["bits"]))
                self._changed.notify_all()
        with self._changed:
            if process.wait() and not self._errors:
                self._errors.append(f"receiver {name} ended with code {process.returncode}")
            self._changed.notify_all()

    def arrival(self, name: str, version: int) -> Arrival | None:
        """The pull with which a receiver reached ``version`` or went past it."""
        with self._changed:
            return next((a for a in self._arrivals[name] if a.report.version >= version), None)

    def wait_for(self, version: int, timeout_s: float) -> None:
        """Returns when all have ``version``. Raises ``StoreUnavailable`` if one fails, in its own words, or is late."""
        deadline = monotonic() + timeout_s
        with self._changed:
            while not all(any(a.report.version >= version for a in self._arrivals[n]) for n in self.names):
                if self._errors:
                    raise StoreUnavailable(self._errors[0])
                if not self._changed.wait(deadline - monotonic()):
                    raise StoreUnavailable(f"not every receiver had version {version} within {timeout_s:.0f} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process, reader in zip(self._processes, self._readers, strict=True):
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            reader.join()
