"""An SGLang server's documented HTTP contract, spoken by a stand-in that loads the directory as the real one would."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dcr_s3 import Receiver, Sender
from dcr_s3.cli.app import run as cli
from dcr_s3.errors import BadInput, StateMismatch, StoreUnavailable
from dcr_s3.sglang import SglangServer, serve_patiently


class StandIn(ThreadingHTTPServer):
    """Answers as an SGLang server does; ``refusals`` are messages it fails with first."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.weights: dict[str, torch.Tensor] = {}
        self.weight_version = "default"
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.refusals: list[tuple[int, str]] = []
        self.forgets_version = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        self._answer(200, {"model_path": "x", "weight_version": self.server.weight_version})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        if self.server.refusals:
            code, message = self.server.refusals.pop(0)
            self._answer(code, {"success": False, "message": message, "num_paused_requests": 0})
            return
        self.server.weights = load_file(Path(body["model_path"]) / "model.safetensors")
        if not self.server.forgets_version:
            self.server.weight_version = body["weight_version"]
        self._answer(200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    def _answer(self, code: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    with StandIn() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    directory = tmp_path / "mirror"
    directory.mkdir()
    save_file({"w": torch.arange(6, dtype=torch.bfloat16)}, directory / "model.safetensors")
    return directory


def test_the_server_loads_the_directory_under_a_path_that_names_the_version(stand_in: StandIn, mirror: Path) -> None:
    server = SglangServer(stand_in.url, mirror)
    assert server.version() is None
    server.serve(3)
    server.serve(3)
    server.serve(4)
    assert server.version() == 4
    paths = [body["model_path"] for _, body in stand_in.requests]
    assert [Path(p).name for p in paths] == ["mirror@000000000003", "mirror@000000000004"]
    assert all(path == "/update_weights_from_disk" for path, _ in stand_in.requests)
    assert all(body["flush_cache"] and not body["abort_all_requests"] for _, body in stand_in.requests)
    assert sorted(p.name for p in mirror.parent.iterdir()) == ["mirror", "mirror@000000000004"]
    assert torch.equal(stand_in.weights["w"], torch.arange(6, dtype=torch.bfloat16))


def test_running_requests_are_aborted_only_if_asked_for(stand_in: StandIn, mirror: Path) -> None:
    SglangServer(stand_in.url, mirror, abort=True).serve(1)
    assert stand_in.requests[0][1]["abort_all_requests"]


def test_a_server_that_cannot_load_now_is_asked_again(stand_in: StandIn, mirror: Path) -> None:
    stand_in.refusals = [(400, "busy"), (503, "starting"), (400, "busy")]
    server = SglangServer(stand_in.url, mirror)
    with pytest.raises(StoreUnavailable, match="version 2 was not loaded: busy"):
        server.serve(2)
    assert serve_patiently(server, 2, threading.Event(), interval_s=0.01)
    assert server.version() == 2
    stopped = threading.Event()
    stopped.set()
    assert not serve_patiently(server, 5, stopped, interval_s=0.01)


def test_what_is_no_sglang_server_is_said_so(stand_in: StandIn, mirror: Path) -> None:
    stand_in.refusals = [(404, "no such path")]
    with pytest.raises(BadInput, match="404"):
        SglangServer(stand_in.url, mirror).serve(1)
    stand_in.forgets_version = True
    with pytest.raises(StateMismatch, match="was told to serve version 1"):
        SglangServer(stand_in.url, mirror).serve(1)
    closed = SglangServer("http://127.0.0.1:9", mirror, timeout_s=2)
    with pytest.raises(StoreUnavailable, match="is the server running"):
        closed.serve(1)


def test_the_command_line_keeps_server_and_directory_together(
    stand_in: StandIn, moto_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"w": torch.arange(600, dtype=torch.bfloat16)}
    (tmp_path / "base").mkdir()
    save_file(state, tmp_path / "base" / "model.safetensors")
    with Sender.open(moto_url, base=state, workers=0) as sender:
        new = {"w": state["w"] + 1}
        sender.publish(new)
        version = sender.position.version
    stand_in.refusals = [(400, "busy")]
    options = ["--base", str(tmp_path / "base"), "--sglang", stand_in.url, "--until-version", str(version)]
    code = cli(["follow", moto_url, str(tmp_path / "served"), *options, "--poll-interval", "0.01", "--json"])
    assert code == 0
    assert json.loads(capsys.readouterr().out)["version"] == version
    assert stand_in.weight_version == str(version)
    assert torch.equal(stand_in.weights["w"], new["w"])
    assert Receiver(moto_url, tmp_path / "served", workers=0).pull().up_to_date
    stand_in.weight_version = "0"
    assert cli(["follow", moto_url, str(tmp_path / "served"), *options[2:], "--json"]) == 0
    assert stand_in.weight_version == str(version)


@pytest.mark.parametrize("options", [[], ["DIR", "--vllm", "http://x"], ["--vllm", "http://x", "--sglang", "http://y"]])
def test_exactly_one_thing_is_followed_with(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["follow", "s3://bucket/run", *options]) == 12
    assert "--vllm" in capsys.readouterr().err
