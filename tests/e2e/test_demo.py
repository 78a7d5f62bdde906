"""The demonstration, short: really trains, publishes, follows with two processes, proves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [str(Path(sys.executable).with_name("dcr-s3")), "demo", "--steps", "2", "--warmup-steps", "4"]


def running_with(marker: str) -> list[int]:
    """Processes of this machine whose environment contains ``marker``."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if marker.encode() in (process / "environ").read_bytes():
                    found.append(int(process.name))
            except OSError:
                continue
    return found


def test_both_mirrors_equal_the_trained_checkpoint(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--json"], env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["mirrors_equal"] is True
    assert [row["step"] for row in outcome["steps"]] == [1, 2]
    for row in outcome["steps"]:
        assert 0 < row["changed_elements"] < row["total_elements"] == outcome["parameters"]
        assert 0 < row["wire_bytes"] < row["dense_bytes"]
        assert set(row["receiver_seconds"]) == {"receiver-a", "receiver-b"}
        assert row["exact"] is not False
    assert outcome["steps"][-1]["exact"] is True
    assert list(tmp_path.glob("dcr-s3-*")) == []


def test_ctrl_c_leaves_neither_processes_nor_files_behind(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    demo = subprocess.Popen(
        [*COMMAND, "--steps", "1000"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    request.addfinalizer(demo.kill)
    marker = f"TMPDIR={tmp_path}\0"
    assert demo.stderr is not None
    for line in demo.stderr:
        if line.startswith("publishing"):
            break
    deadline = time.monotonic() + 60
    while len(running_with(marker)) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(running_with(marker)) >= 3
    demo.send_signal(signal.SIGINT)
    rest = demo.communicate(timeout=60)[1]
    assert demo.returncode == 130, rest
    assert "Traceback" not in rest
    assert running_with(marker) == []
    assert list(tmp_path.glob("dcr-s3-*")) == []
