"""The channel to a vLLM server's workers, against a stand-in that answers as vLLM does."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from dcr_s3.errors import ApplyExpired, BadInput, DcrError, StoreUnavailable
from dcr_s3.vllm.channels import AsyncRanks, HttpRanks, LlmRanks

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


class Older:
    """An ``LLM`` whose workers have the extension or not, and that knows nothing of weight versions."""

    def __init__(self, *, extended: bool, cached: bool = False) -> None:
        self.extended, self.cached = extended, cached

    def collective_rpc(self, method: str, args: tuple[str, str]) -> list[Any]:
        if not self.extended:
            raise AttributeError(f"'Worker' object has no attribute {method!r}")
        return [{"result": [args[0], *json.loads(args[1])]}]

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return not self.cached or reset_running_requests


class OlderAsync(Older):
    """The same as an ``AsyncLLM``."""

    async def collective_rpc(self, method: str, args: tuple[str, str]) -> list[Any]:  # type: ignore[override]
        return super().collective_rpc(method, args)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:  # type: ignore[override]
        return super().reset_prefix_cache(reset_running_requests)


def test_an_engine_without_weight_versions_needs_the_extension_alone() -> None:
    ranks = LlmRanks(Older(extended=True))
    assert ranks.call("apply", 3, True) == [["apply", 3, True]]
    ranks.serving(3)
    ranks.reset_caches()
    with pytest.raises(BadInput, match="worker_extension_cls"):
        LlmRanks(Older(extended=False)).call("digests")
    with pytest.raises(BadInput, match="prefix cache"):
        LlmRanks(Older(extended=True, cached=True)).reset_caches()


def test_an_async_engine_is_reached_from_another_thread() -> None:
    async def drive() -> None:
        ranks = AsyncRanks(OlderAsync(extended=True))
        assert await asyncio.to_thread(ranks.call, "apply", 3, True) == [["apply", 3, True]]
        await asyncio.to_thread(ranks.serving, 3)
        with pytest.raises(BadInput, match="worker_extension_cls"):
            await asyncio.to_thread(AsyncRanks(OlderAsync(extended=False)).call, "digests")
        cached = OlderAsync(extended=True, cached=True)
        with pytest.raises(DcrError, match="prefix cache"):
            await asyncio.to_thread(AsyncRanks(cached).reset_caches)
        await asyncio.to_thread(AsyncRanks(cached, pause_mode="keep").reset_caches)

    asyncio.run(drive())


def test_the_model_is_the_servers(server: StandIn, ranks: HttpRanks) -> None:
    server.replies["/v1/models"] = (200, {"data": [{"id": "x", "root": "/models/base"}]})
    assert ranks.model() == "/models/base"
