"""The channel to a vLLM server's workers, against a stand-in that answers as vLLM does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from dcr_s3.errors import ApplyExpired, BadInput, DcrError, StoreUnavailable
from dcr_s3.vllm.channels import HttpRanks

IDLE = {"result": {"error": "", "error_kind": "", "version": 3}}
EXPIRED = {"result": {"error": "the pause took too long", "error_kind": "ApplyExpired"}}


class StandIn(ThreadingHTTPServer):
    """``replies`` maps a path to (code, body); anything else is answered 404."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies: dict[str, tuple[int, Any]] = {}
        self.asked: list[str] = []


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"null")
        called = f":{body['args'][0]}" if self.path == "/collective_rpc" else ""
        self.server.asked.append(self.path + called)
        code, answer = self.server.replies.get(self.path + called, (404, {}))
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST  # noqa: N815 - the base class names it

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[StandIn]:
    with StandIn() as stand_in:
        threading.Thread(target=stand_in.serve_forever, daemon=True).start()
        yield stand_in
        stand_in.shutdown()


@pytest.fixture
def ranks(server: StandIn) -> HttpRanks:
    return HttpRanks(f"http://127.0.0.1:{server.server_port}/", timeout_s=10)


def test_writing_goes_through_vllms_own_update_calls(server: StandIn, ranks: HttpRanks) -> None:
    for path in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
        server.replies[path] = (200, {})
    server.replies["/collective_rpc:status"] = (200, {"results": [IDLE, IDLE]})
    assert ranks.call("apply", 3, True) == [IDLE["result"]] * 2
    assert server.asked[:3] == ["/start_weight_update", "/update_weights", "/finish_weight_update"]


def test_a_worker_that_fails_is_heard_and_the_update_is_ended(server: StandIn, ranks: HttpRanks) -> None:
    server.replies["/start_weight_update"] = (200, {})
    server.replies["/update_weights"] = server.replies["/finish_weight_update"] = (500, {"error": "engine"})
    server.replies["/collective_rpc:status"] = (200, {"results": [IDLE, EXPIRED]})
    with pytest.raises(ApplyExpired, match="took too long"):
        ranks.call("apply", 3, True)
    assert "/finish_weight_update" in server.asked


def test_errors_of_workers_keep_their_kind(server: StandIn, ranks: HttpRanks) -> None:
    failed = {"error": "no such tensor", "error_kind": "BadInput"}
    server.replies["/collective_rpc:digests"] = (200, {"results": [{"result": {}}, failed]})
    with pytest.raises(BadInput, match="rank 1: no such tensor"):
        ranks.call("digests")
    unknown = {"error": "boom", "error_kind": "ZeroDivisionError"}
    server.replies["/collective_rpc:digests"] = (200, {"results": [unknown]})
    with pytest.raises(DcrError, match="rank 0: boom"):
        ranks.call("digests")


def test_what_is_missing_is_said(server: StandIn, ranks: HttpRanks) -> None:
    with pytest.raises(BadInput, match="VLLM_SERVER_DEV_MODE=1"):
        ranks.close()
    server.replies["/collective_rpc:digests"] = (500, {"error": "'Worker' object has no attribute 'dcr_s3'"})
    with pytest.raises(BadInput, match="--worker-extension-cls"):
        ranks.call("digests")
    server.replies["/reset_prefix_cache"] = (200, {"success": False})
    with pytest.raises(DcrError, match="prefix cache"):
        ranks.reset_caches()
    with pytest.raises(StoreUnavailable, match="is the server running"):
        HttpRanks("http://127.0.0.1:9", timeout_s=2).open()


def test_the_model_is_the_servers(server: StandIn, ranks: HttpRanks) -> None:
    server.replies["/v1/models"] = (200, {"data": [{"id": "x", "root": "/models/base"}]})
    assert ranks.model() == "/models/base"
