"""Relaying between two addresses of a real server, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dcr_s3.cli.app import run


def write_checkpoint(directory: Path, seed: int) -> Path:
    directory.mkdir(parents=True)
    cells = np.random.default_rng(0).integers(0, 1 << 16, 50_000, np.uint16)
    cells[: seed * 100] ^= 1
    save_file({"a.weight": cells}, directory / "model.safetensors")
    return directory


def test_relay_then_pull_nearby(
    seaweed_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCR_STATE_DIR", str(tmp_path / "state"))
    source, copies = f"{seaweed_url}/run", [f"{seaweed_url}/eu", f"{seaweed_url}/asia"]
    assert run(["init", source, "--base", str(write_checkpoint(tmp_path / "base", 0)), "--upload-base"]) == 0
    for seed in (1, 2):
        assert run(["publish", source, str(write_checkpoint(tmp_path / f"new-{seed}", seed))]) == 0
    capsys.readouterr()
    assert run(["relay", source, *copies, "--once", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["version"], report["versions"]) == (2, 2)
    assert report["down_bytes"] < report["up_bytes"] < 2.1 * report["down_bytes"]
    assert run(["relay", source, copies[0], "--until-version", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["versions"] == 0
    assert run(["pull", source, str(tmp_path / "mirror"), "--nearby", copies[0], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 2
    assert run(["verify", source, str(tmp_path / "mirror")]) == 0
    assert run(["pull", copies[1], str(tmp_path / "mirror-asia"), "--json"]) == 0
    capsys.readouterr()
    assert run(["status", source, "--json"]) == 0
    receivers = {r["name"]: r["version"] for r in json.loads(capsys.readouterr().out)["receivers"]}
    assert receivers.pop("relay") == 2
    assert list(receivers.values()) == [2]  # the one that reads the copy is a member of the run itself


def test_relay_of_nothing(seaweed_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["relay", f"{seaweed_url}/none", f"{seaweed_url}/copy", "--once"]) == 12
    assert "RunMissing" in capsys.readouterr().err


def test_relay_that_codes_anew(
    seaweed_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCR_STATE_DIR", str(tmp_path / "state"))
    source, target = f"{seaweed_url}/run", f"{seaweed_url}/recoded"
    assert run(["init", source, "--base", str(write_checkpoint(tmp_path / "base", 0)), "--upload-base"]) == 0
    assert run(["publish", source, str(write_checkpoint(tmp_path / "new", 1))]) == 0
    relay = ["relay", source, target, "--recode", str(tmp_path / "relay"), "--once", "--json"]
    capsys.readouterr()
    assert run(relay) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 1
    assert run(["pull", target, str(tmp_path / "mirror")]) == 0
    mirror, new = (tmp_path / name / "model.safetensors" for name in ("mirror", "new"))
    assert mirror.read_bytes() == new.read_bytes()
    assert run([*relay[:2], source + "-2", target, *relay[3:]]) == 12  # two targets
    assert run(["pull", source, str(tmp_path / "mixed"), "--nearby", target]) == 12
    assert "is another run" in capsys.readouterr().err
