"""A minute of publishing through a bad network, server restarted in the middle; ``scripts/soak`` does ten."""

from __future__ import annotations

import json
import subprocess
import sys


def test_a_bad_network_and_a_restarted_server_harm_nobody() -> None:
    command = [sys.executable, "-m", "dcr_s3.testing.soak", "--minutes", "1", "--restarts", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.stdout, done.stderr
    figures = json.loads(done.stdout)
    assert figures["errors"] == []
    assert figures["missing"] == 0
    assert figures["mismatches"] == 0
    assert figures["restarts"] == 1
    assert figures["versions"] > 20
    assert sum(figures["faults"].values()) > 0
