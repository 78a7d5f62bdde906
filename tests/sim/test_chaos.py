"""Real processes on a real S3 server, killed at random moments."""

from __future__ import annotations

import json
import subprocess
import sys

ROUNDS = 4


def test_killed_processes_leave_no_wrong_bit() -> None:
    command = [sys.executable, "-m", "dcr_s3.testing.chaos", "--rounds", str(ROUNDS), "--size-mb", "4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["rounds"] == ROUNDS
    assert sum(figures["kills"].values()) > 0
    assert figures["mismatches"] == 0
