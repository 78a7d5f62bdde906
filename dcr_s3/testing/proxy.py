"""A slow, unreliable network in front of an S3 server, for processes and clients that cannot be wrapped."""

from __future__ import annotations

import http.client
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from dcr_s3.store.throttled import Link
from dcr_s3.testing.faults import FaultKind, FaultPlan, flipped

_HOST = "127.0.0.1"
_CHUNK_BYTES = 64 * 1024
_SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>injected</Message></Error>"
_CONFLICT = b"<?xml version='1.0'?><Error><Code>ConditionalRequestConflict</Code><Message>injected</Message></Error>"
_HOP_HEADERS = ("connection", "keep-alive", "transfer-encoding", "expect")


class FaultyProxy:
    """Passes HTTP requests on to ``upstream_url`` and disturbs them as ``plan`` says; a context manager.

    Requests go by their method, keys by ``/bucket/key``. Each way has ``bytes_per_s`` for all connections together
    (None: no limit), and each request waits ``latency_s`` first. Signatures stay valid: the Host header is passed on,
    so clients sign for this proxy and servers check what was signed.
    """

    def __init__(
        self,
        upstream_url: str,
        plan: FaultPlan | None = None,
        *,
        bytes_per_s: float | None = None,
        latency_s: float = 0.0,
        delay_s: float = 0.5,
    ) -> None:
        self.plan = plan or FaultPlan()
        self.upstream = urlsplit(upstream_url).netloc
        self.latency_s = latency_s
        self.delay_s = delay_s
        self.up = Link(bytes_per_s or float("inf"))
        self.down = Link(bytes_per_s or float("inf"))
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="proxy", daemon=True)

    @property
    def endpoint_url(self) -> str:
        return f"http://{_HOST}:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, proxy: FaultyProxy) -> None:
        super().__init__((_HOST, 0), _Handler)
        self.proxy = proxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: connections that break are what a proxy like this is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def _pass_on(self) -> None:
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        place = f"{urlsplit(self.path).query}{self.headers.get('Range', '')}"
        key = unquote(urlsplit(self.path).path)
        kind = proxy.plan.strike(self.command, key, place, _possible(self.command, self.headers))
        time.sleep(proxy.latency_s + (proxy.delay_s if kind is FaultKind.DELAY else 0.0))
        if kind is FaultKind.UNAVAILABLE:
            self._answer(503, [], _SLOW_DOWN)
            return
        if kind is FaultKind.CONFLICT:
            self._answer(409, [], _CONFLICT)
            return
        if kind is FaultKind.FLIPPED_BIT and self.command == "PUT":
            body = bytes(flipped(body))
        _wait_until(proxy.up.reserve(len(body), time.monotonic()))
        status, headers, reply = self._forward(body)
        if kind is FaultKind.LOST_REPLY:
            self.close_connection = True
            return
        if kind is FaultKind.FLIPPED_BIT and self.command == "GET":
            reply = bytes(flipped(reply))
        self._answer(status, headers, reply, stop_half_way=kind is FaultKind.SHORT_BODY)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on  # noqa: N815 (names that http.server looks up)

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.server.proxy.upstream, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in _HOP_HEADERS:
                    connection.putheader(name, value)
            connection.endheaders(body or None)
            reply = connection.getresponse()
            headers = [(name, value) for name, value in reply.getheaders() if name.lower() not in _HOP_HEADERS]
            return reply.status, headers, reply.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, *, stop_half_way: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in headers) and status not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        end = len(body) // 2 if stop_half_way else len(body)
        for start in range(0, end, _CHUNK_BYTES):
            chunk = body[start : min(end, start + _CHUNK_BYTES)]
            self.wfile.write(chunk)
            _wait_until(self.server.proxy.down.reserve(len(chunk), time.monotonic()))
        self.close_connection = self.close_connection or stop_half_way


def _possible(method: str, headers: Any) -> set[FaultKind]:
    kinds = {FaultKind.UNAVAILABLE, FaultKind.LOST_REPLY, FaultKind.DELAY}
    if method == "PUT" and ("If-None-Match" in headers or "If-Match" in headers):
        kinds |= {FaultKind.CONFLICT}
    if method == "GET":
        kinds |= {FaultKind.SHORT_BODY}
    if method in ("GET", "PUT"):
        kinds |= {FaultKind.FLIPPED_BIT}
    return kinds


def _wait_until(moment: float) -> None:
    wait_s = moment - time.monotonic()
    if wait_s > 0:
        time.sleep(wait_s)
