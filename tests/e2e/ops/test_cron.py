"""`dcr-s3 pull` as cron runs it, and `follow` as a service manager does."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dcr_s3 import Sender, init_run
from dcr_s3.cli.app import run
from dcr_s3.cli.pulling import pull_once
from dcr_s3.store import open_store
from dcr_s3.store.metered import MeteredStore
from dcr_s3.targets.directory import acquire
from dcr_s3.testing.proxy import FaultyProxy
from dcr_s3.testing.servers import EmbeddedS3
from dcr_s3.workers import no_progress


def write_checkpoint(directory: Path, seed: int) -> Path:
    directory.mkdir(parents=True)
    cells = np.random.default_rng(0).integers(0, 1 << 16, 50_000, np.uint16)
    cells[np.random.default_rng(seed).integers(0, 50_000, 100 * seed)] ^= 1
    save_file({"a.weight": cells}, directory / "model.safetensors")
    return directory


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DCR_STATE_DIR", str(tmp_path / "state"))
    write_checkpoint(tmp_path / "base", 0)
    return tmp_path


@pytest.fixture
def url(moto_url: str, home: Path) -> str:
    init_run(moto_url, home / "base", upload_base=True, workers=0)
    return moto_url


def publish(url: str, home: Path, seed: int) -> None:
    with Sender.open(url, fence=False, workers=0) as sender:
        sender.publish(write_checkpoint(home / f"new-{seed}", seed), step=seed)


def test_cron_says_something_only_if_something_happened(
    url: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["pull", url, str(home / "mirror"), "--cron", "--jitter", "0.01"]
    publish(url, home, 1)
    assert run(command) == 0
    assert "version 1" in capsys.readouterr().out
    assert run(command) == 0
    assert capsys.readouterr() == ("", "")
    publish(url, home, 2)
    assert run(command) == 0
    assert "version 2" in capsys.readouterr().out


def test_machines_get_their_object_also_where_people_hear_nothing(
    url: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["pull", url, str(home / "mirror"), "--cron", "--json"]
    publish(url, home, 1)
    for up_to_date in (False, True):
        assert run(command) == 0
        assert json.loads(capsys.readouterr().out)["up_to_date"] is up_to_date
    lock = acquire(home / "mirror")
    publish(url, home, 2)
    assert run(command) == 0
    assert json.loads(capsys.readouterr().out) == {"busy": True}
    lock.release()


def test_overlapping_runs_do_no_harm(url: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(url, home, 1)
    lock = acquire(home / "mirror")
    assert run(["pull", url, str(home / "mirror"), "--cron"]) == 0
    assert capsys.readouterr() == ("", "")
    assert run(["pull", url, str(home / "mirror")]) == 10
    lock.release()
    assert run(["pull", url, str(home / "mirror"), "--cron"]) == 0


def test_nothing_new_costs_one_request(url: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = MeteredStore(open_store(url))
    monkeypatch.setattr("dcr_s3.cli.pulling.open_nearest", lambda *_: opened)
    arguments = {"base": None, "nearby": [], "to_version": None, "skip_busy": True, "progress": no_progress}
    pull_once(url, home / "mirror", **arguments)
    before = opened.meter.traffic
    report = pull_once(url, home / "mirror", **arguments)
    used = opened.meter.traffic - before
    assert (used.total_requests, used.down_bytes) == (1, 0)
    assert report is not None
    assert report.up_to_date
    assert report.total_elements == 50_000
    publish(url, home, 1)
    report = pull_once(url, home / "mirror", **arguments)
    assert report is not None
    assert report.version == 1


def test_textfile(url: str, home: Path) -> None:
    textfile = home / "dcr.prom"
    for _ in range(2):
        assert run(["pull", url, str(home / "mirror"), "--cron", "--textfile", str(textfile)]) == 0
    assert run(["pull", url, str(home / "nowhere"), "--base", str(home / "none"), "--textfile", str(textfile)]) == 12
    text = textfile.read_text()
    assert f'dcr_s3_looks_total{{role="receiver",run="{url}"}} 2.0' in text
    assert 'error="BadInput"' in text


def test_timeout_ends_a_pull_and_the_next_one_goes_on(
    moto_server: EmbeddedS3, url: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(url, home, 1)
    command = ["pull", url, str(home / "mirror")]
    with FaultyProxy(moto_server.endpoint_url, latency_s=1.0) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint_url)
        assert run([*command, "--timeout", "1.5"]) == 10
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", moto_server.endpoint_url)
    assert run(command) == 0
    assert run(["verify", url, str(home / "mirror")]) == 0


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """The service manager's end of the notification socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(tmp_path / "notify"))
        channel.settimeout(60)
        yield channel


def hear(manager: socket.socket, wanted: str) -> None:
    """Waits for a message; the socket's time-out ends the test."""
    while wanted not in manager.recv(4096).decode():
        pass


def test_follow_under_a_service_manager(url: str, home: Path, manager: socket.socket) -> None:
    environment = {**os.environ, "NOTIFY_SOCKET": str(home / "notify"), "WATCHDOG_USEC": "200000"}
    command = [
        str(Path(sys.executable).with_name("dcr-s3")),
        "follow",
        url,
        str(home / "mirror"),
        "--poll-interval",
        "0.05",
    ]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        hear(manager, "READY=1")
        hear(manager, "WATCHDOG=1")
        publish(url, home, 1)
        hear(manager, "STATUS=holds version 1")
        process.send_signal(signal.SIGHUP)
        hear(manager, "RELOADING=1")
        hear(manager, "READY=1")
        publish(url, home, 2)
        hear(manager, "STATUS=holds version 2")
        process.send_signal(signal.SIGTERM)
        hear(manager, "STOPPING=1")
        assert process.wait(timeout=60) == 143
    finally:
        process.kill()
        process.communicate()
    assert run(["verify", url, str(home / "mirror")]) == 0


def test_a_stuck_store_starves_the_watchdog(home: Path) -> None:
    from dcr_s3.cli.service import WatchedStore
    from dcr_s3.store.memory import MemoryStore

    fed = []
    release = threading.Event()

    class Stuck(MemoryStore):
        def head(self, key: str) -> object:  # type: ignore[override]
            release.wait(30)
            return super().head(key)

    store = WatchedStore(Stuck(), lambda: fed.append(time.monotonic()))
    store.put("a", b"")
    assert len(fed) == 1
    stuck = threading.Thread(target=store.head, args=("a",))
    stuck.start()
    assert len(fed) == 1
    release.set()
    stuck.join()
    assert len(fed) == 2


def test_logs_for_machines(
    url: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dcr_s3.cli.output import Output

    monkeypatch.setenv("DCR_LOG", "json")
    with Output(verbose=1):
        try:
            raise ValueError("inner")
        except ValueError:
            logging.getLogger("dcr_s3.anything").exception("said %s", "this")
    entry = json.loads(capsys.readouterr().err)
    assert (entry["level"], entry["logger"], entry["message"]) == ("error", "dcr_s3.anything", "said this")
    assert "ValueError: inner" in entry["traceback"]
