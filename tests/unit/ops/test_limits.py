"""The end of a command that takes too long."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dcr_s3.cli.limits import TimedOut, spread, time_limit
from dcr_s3.world import World, living_in

HANGS = """
import time
from dcr_s3.cli.limits import time_limit
with time_limit(0.2, grace_s=0.2):
    try:
        time.sleep(60)
    finally:
        time.sleep(60)
"""


def test_a_clean_up_that_hangs_is_ended_too() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == TimedOut.exit_code == 10
    assert "still not over" in done.stderr


def test_no_limit_and_a_limit_that_is_kept() -> None:
    with time_limit(None), time_limit(60.0):
        pass


def test_spread_waits_up_to_its_jitter() -> None:
    class Counting(World):
        slept = 0.0

        def uniform(self, low: float, high: float) -> float:
            return high

        def sleep(self, seconds: float) -> None:
            self.slept += seconds

    counting = Counting()
    with living_in(counting):
        spread(0.0)
        assert counting.slept == pytest.approx(0.0)
        spread(7.0)
    assert counting.slept == pytest.approx(7.0)
