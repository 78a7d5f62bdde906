"""The dashboard's page, made from a bucket and served on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from pydantic import ValidationError

from dcr_s3.dashboard.page import render
from dcr_s3.errors import BadInput, DcrError
from dcr_s3.overview import overview
from dcr_s3.reports import PublishReport, PullReport
from dcr_s3.store import open_store
from dcr_s3.world import timestamp

REFRESH_S = 10


def make_page(run: str, *, last: int, reports: Sequence[Path], refresh_s: int | None = None) -> str:
    """The page about the run at an address. Raises as :func:`dcr_s3.overview.overview`, and ``BadInput``."""
    with closing(open_store(run)) as store:
        found = overview(store, last=last)
        url = store.url
    read = [report for path in reports for report in read_reports(path)]
    return render(found, url=url, made_at=timestamp("seconds"), reports=read, refresh_s=refresh_s)


def read_reports(path: Path) -> list[PublishReport | PullReport]:
    """Reports as ``publish`` and ``pull`` print them with ``--json``, one object a line; pulls that found nothing new
    are left out. Raises ``BadInput`` naming the line."""
    found: list[PublishReport | PullReport] = []
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from error
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
            report = PullReport.model_validate(data) if "from_version" in data else PublishReport.model_validate(data)
        except (ValueError, TypeError, ValidationError) as error:
            raise BadInput(f"{path}, line {number}: is no report of publish or pull") from error
        if not (isinstance(report, PullReport) and report.up_to_date):
            found.append(report)
    return found


def serve_page(run: str, *, port: int, last: int, reports: Sequence[Path], stop: threading.Event) -> Iterator[str]:
    """Serves a page that is made anew for each request; yields its host and port once, and goes on until ``stop``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                body, status = make_page(run, last=last, reports=reports, refresh_s=REFRESH_S).encode(), 200
            except DcrError as error:
                body, status = f"{type(error).__name__}: {error}\n".encode(), 503
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8" if status == 200 else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise BadInput(f"port {port}: {error.strerror or error}; choose another one with --port") from error
    thread = threading.Thread(target=server.serve_forever, args=(0.2,), daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
        stop.wait()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
