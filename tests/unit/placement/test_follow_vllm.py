"""`follow --vllm`, and what looks into an engine, against a server that holds real ranks behind vLLM's HTTP calls."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from dcr_s3 import Sender
from dcr_s3.cli.app import run as cli
from dcr_s3.rank import answer
from dcr_s3.store.memory import MemoryStore

sys.path.insert(0, str(Path(__file__).parent))
import toys
from groups import Group, loaded, published


class EngineServer(ThreadingHTTPServer):
    """Answers as vLLM does, for ranks that were loaded from ``base``. ``on_apply`` is called before writing."""

    def __init__(self, group: Group, base: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.group = group
        self.base = str(base)
        self.asked: list[str] = []
        self.on_apply: Callable[[], object] = lambda: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def reply(self, path: str, body: dict[str, Any]) -> object:
        if path == "/v1/models":
            return {"data": [{"root": self.base}]}
        if path == "/init_weight_transfer_engine":
            info = body["init_info"]
            self.group.call("open", info["run"], info["base"], info["pause_limit_s"], info["nearby"])
        if path == "/update_weights":
            self.on_apply()
            info = body["update_info"]
            self.group.call("apply", info["version"], info["verify"])
        if path == "/collective_rpc":
            method, arguments = body["args"]
            return {"results": [answer(rank, method, json.loads(arguments)) for rank in self.group.ranks]}
        if path == "/update_weight_version":
            self.group.serving(int(body["new_version"]))
        return {"success": True}


class Handler(BaseHTTPRequestHandler):
    server: EngineServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"null")
        self.server.asked.append(self.path + (f":{body['args'][0]}" if self.path == "/collective_rpc" else ""))
        try:
            code, found = 200, self.server.reply(urlsplit(self.path).path, body)
        except Exception as error:
            code, found = 500, {"error": str(error)}
        data = json.dumps(found).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST  # noqa: N815 - the base class names it

    def log_message(self, *_: object) -> None:
        pass


class Engine:
    """A served engine of two ranks and the sender of its run."""

    def __init__(
        self, run: str, server: EngineServer, ranks: list[toys.Toy], state: toys.State, sender: Sender
    ) -> None:
        self.run, self.server, self.ranks, self.state, self.sender = run, server, ranks, state, sender

    def publish(self) -> int:
        self.state = toys.changed(self.state, self.sender.position.version)
        return self.sender.publish(self.state).version

    def follow(self, *options: str) -> int:
        command = ["follow", self.run, "--vllm", self.server.url, "--poll-interval", "0.01", "--json"]
        return cli([*command, "--until-version", str(self.sender.position.version), *options])

    def holds(self) -> bool:
        return all(toys.bits(toy) == toys.bits(loaded(toys.Split(n), self.state)) for n, toy in enumerate(self.ranks))


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    run = f"memory://{request.node.name}"
    from dcr_s3.store import open_store

    store = open_store(run)
    assert isinstance(store, MemoryStore)
    state, sender = published(toys.Split, store, tmp_path / "base", context=False)
    ranks = [loaded(toys.Split(rank), state) for rank in (0, 1)]
    with EngineServer(Group(*ranks), tmp_path / "base") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Engine(run, server, ranks, state, sender)
        server.shutdown()
    sender.close()


def called(engine: Engine) -> list[str]:
    """What the server was asked, from the pause on."""
    asked = [a for a in engine.server.asked if not a.endswith(":status")]
    return asked[next(n for n, a in enumerate(asked) if a.startswith("/pause")) :]


def test_versions_are_staged_while_requests_run_and_written_in_a_pause(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    version = engine.publish()
    assert engine.follow() == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["version"], data["last"]["kind"]) == (version, "delta")
    assert data["pulls"] == 2
    assert len(data["last"]["rank_wire_bytes"]) == 2
    assert engine.holds()
    assert engine.server.group.served[-1] == version
    assert called(engine) == [
        "/pause?mode=wait",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/resume",
        "/collective_rpc:settle",
    ]


def test_synchronous_mode_and_kept_requests(engine: Engine) -> None:
    engine.publish()
    assert engine.follow("--mode", "synchronous", "--pause", "keep", "--verify", "full") == 0
    assert engine.holds()
    asked = called(engine)
    assert asked[:2] == ["/pause?mode=keep", "/collective_rpc:stage"]
    assert "/collective_rpc:digests" in asked
    assert "/reset_prefix_cache?reset_running_requests=true" in asked


def test_the_engine_is_a_member_under_a_name_of_its_own_or_another_or_not_at_all(engine: Engine) -> None:
    version = engine.publish()
    assert engine.follow("--no-ack") == 0
    assert engine.sender.wait_for(version, 0, timeout_s=0) == []
    assert engine.follow("--name", "engine-7") == 0
    assert engine.sender.wait_for(version, ["engine-7"], timeout_s=0) == ["engine-7"]
    assert engine.follow() == 0
    assert len(engine.sender.wait_for(version, 2, timeout_s=0)) == 2


def test_only_released_versions_are_served(engine: Engine) -> None:
    first = engine.publish()
    assert engine.follow("--name", "engine") == 0
    engine.sender.release(first, ["engine"])
    engine.publish()
    assert engine.follow("--released-only", "--until-version", str(first)) == 0
    assert engine.server.group.served[-1] == first


def test_it_is_a_service_with_metrics_like_any_follower(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    heard: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "20000")

        def listen() -> None:
            while "STOPPING=1" not in heard:
                heard.append(manager.recv(4096).decode().split("\n")[0])

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        last = engine.publish() + 1

        def reload_and_publish() -> None:
            engine.server.on_apply = lambda: None
            os.kill(os.getpid(), signal.SIGHUP)
            engine.publish()

        engine.server.on_apply = reload_and_publish
        assert engine.follow("--metrics-port", str(port), "--until-version", str(last)) == 0
        listener.join()
    told = [h for h in heard if h != "WATCHDOG=1"]
    assert told[:4] == ["READY=1", "STATUS=holds version 1", "RELOADING=1", "READY=1"]
    assert told[-2:] == [f"STATUS=holds version {last}", "STOPPING=1"]
    assert "WATCHDOG=1" in heard
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
        text = reply.read().decode()
    assert f'dcr_s3_version{{role="receiver",run="{engine.run}"}} {float(last)}' in text
    assert engine.holds()


def test_bind_and_resident_look_into_it(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    version = engine.publish()
    assert engine.follow() == 0
    capsys.readouterr()
    assert cli(["resident", engine.run, "--vllm", engine.server.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == version
    assert cli(["bind", engine.run, "--vllm", engine.server.url, "--explain", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [t["name"] for t in found["ranks"][1]] == list(toys.Split.CANONICAL)
    engine.ranks[1].columns.data[0, 0] = 3.0
    assert cli(["resident", engine.run, "--vllm", engine.server.url]) == 12
    assert "columns" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["DIR", "--mode", "synchronous"],
        ["DIR", "--verify", "full"],
        ["DIR", "--pause", "abort"],
        ["DIR", "--sglang", "http://x", "--pause", "keep"],
        ["DIR", "--sglang", "http://x", "--verify", "off"],
    ],
)
def test_what_a_target_cannot_do_is_said(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["follow", "s3://bucket/run", *options]) == 12
    assert "--vllm" in capsys.readouterr().err
