"""What a command says: its result on stdout, everything else on stderr."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.logging import RichHandler
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from dcr_s3.cli.logs import JsonFormatter

stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False, width=None if sys.stdout.isatty() else 160)


class Output:
    """One command's output. Use as a context manager around the work; ``progress`` may be called from any thread."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False, verbose: int = 0) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.description:>10}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=stderr,
            transient=True,
            disable=quiet or not stderr.is_terminal,
        )
        level = logging.ERROR if quiet else (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
        # Only this package's logger: the S3 client's own debug output contains signed headers.
        logger = logging.getLogger("dcr_s3")
        logger.handlers = [_log_handler()]
        logger.setLevel(level)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        """Moves the bar of ``stage``; the first call shows it."""
        with self._lock:
            if stage not in self._tasks:
                self._bars.start()
                self._tasks[stage] = self._bars.add_task(stage)
        self._bars.update(self._tasks[stage], completed=done_bytes, total=total_bytes or None)

    def note(self, text: str) -> None:
        """One line about what is going on."""
        if not self.quiet:
            stderr.print(text, soft_wrap=True, markup=False)

    def result(self, data: Mapping[str, Any], *shown: RenderableType) -> None:
        """The command's result: ``data`` as one JSON object, or ``shown`` for people."""
        self._bars.stop()
        if self.as_json:
            print(json.dumps(data, default=str))
        elif not self.quiet:
            for item in shown:
                stdout.print(item, soft_wrap=isinstance(item, str), markup=False)


def _log_handler() -> logging.Handler:
    """For people, or, with DCR_LOG=json in the environment, for machines."""
    if os.environ.get("DCR_LOG") != "json":
        return RichHandler(console=stderr, show_path=False, markup=False, highlighter=None)
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    return handler


def size(size_bytes: int) -> str:
    """Decimal bytes for people: ``68.5 MB``."""
    return decimal(size_bytes)


def percent(part: int, whole: int) -> str:
    """A share with three significant digits: ``0.163 %``."""
    return f"{100 * part / whole:.3g} %" if whole else "0 %"


def ratio(dense_bytes: int, wire_bytes: int) -> str:
    """How many times smaller than a full copy: ``231x``."""
    times = dense_bytes / max(wire_bytes, 1)
    return f"{times:,.0f}x" if times >= 10 else f"{times:.1f}x"
