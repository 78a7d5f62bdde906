"""Real processes on a real S3 server, killed at random moments."""

from __future__ import annotations

import json
import subprocess
import sys

ROUNDS = 6
SEED = 1
"""The first rounds of which kill each kind of process."""


def test_killed_processes_leave_no_wrong_bit() -> None:
    command = [sys.executable, "-m", "dcr_s3.testing.chaos", "--rounds", str(ROUNDS), "--size-mb", "4", "--json"]
    done = subprocess.run([*command, "--seed", str(SEED)], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["rounds"] == ROUNDS
    killed = {place.partition(":")[0] for place in figures["kills"]}
    assert "receive" in killed
    assert killed & {"committer", "owner"}
    assert figures["mismatches"] == 0
