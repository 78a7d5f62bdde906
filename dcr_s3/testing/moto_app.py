"""moto's S3 server, held to two promises of S3 that it does not keep alone.

Conditional writes have exactly one winner, and a body that does not match its checksum header is refused.
"""

from __future__ import annotations

import base64
import hashlib
import io
import logging
import threading
import zlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import crc32c
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import BaseWSGIServer, make_server

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_CHECKSUMS: dict[str, Callable[[bytes], bytes]] = {
    "HTTP_CONTENT_MD5": lambda body: hashlib.md5(body, usedforsecurity=False).digest(),
    "HTTP_X_AMZ_CHECKSUM_CRC32": lambda body: zlib.crc32(body).to_bytes(4, "big"),
    "HTTP_X_AMZ_CHECKSUM_CRC32C": lambda body: crc32c.crc32c(body).to_bytes(4, "big"),
}


class StrictS3:
    """A WSGI application around moto's."""

    def __init__(self, app: WSGIApplication) -> None:
        self._app = app
        self._writing = threading.Lock()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "PUT" and "CONTENT_LENGTH" in environ:
            return self._put(environ, start_response)
        return self._known_upload(environ, start_response)

    def _put(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"] or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        if not _is_intact(environ, body):
            return _refuse(start_response, "400 Bad Request", "BadDigest", "The checksum did not match the body.")
        if "uploadId=" in environ.get("QUERY_STRING", ""):
            return self._known_upload(environ, start_response)
        with self._writing:
            return self._app(environ, start_response)

    def _known_upload(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        try:
            return self._app(environ, start_response)
        except KeyError:
            # moto fails on an upload it does not know, which clients would take for a reason to try again.
            if "uploadId=" not in environ.get("QUERY_STRING", ""):
                raise
            return _refuse(start_response, "404 Not Found", "NoSuchUpload", "The upload does not exist.")


def _is_intact(environ: WSGIEnvironment, body: bytes) -> bool:
    if "aws-chunked" in environ.get("HTTP_CONTENT_ENCODING", ""):
        return True  # the checksum is in a trailer that moto takes apart
    return all(
        base64.b64encode(checksum(body)).decode() == environ[header]
        for header, checksum in _CHECKSUMS.items()
        if header in environ
    )


def _refuse(start_response: StartResponse, status: str, code: str, message: str) -> Iterable[bytes]:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [body]


class _QuietHandler(MotoRequestHandler):
    """Keeps connections open and the console quiet."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def log(self, type: str, message: str, *args: Any) -> None:
        """Says nothing: requests of tests and demonstrations are of no interest."""


def make_moto_server(host: str, port: int) -> BaseWSGIServer:
    """A server that is bound but does not serve yet."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = StrictS3(DomainDispatcherApplication(create_backend_app))
    return make_server(host, port, app, threaded=True, request_handler=_QuietHandler)
