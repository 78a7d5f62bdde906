"""Long runs of the real code, with every fault there is."""

from __future__ import annotations

import pytest

from dcr_s3.testing.sim import run_seed


@pytest.mark.parametrize("seed", range(16))
def test_no_promise_is_broken_and_all_converge_once_faults_stop(seed: int) -> None:
    result = run_seed(seed)
    assert result.versions > 4
    assert result.crashes > 0


def test_the_same_seed_gives_the_same_trace() -> None:
    first, second, other = run_seed(3), run_seed(3), run_seed(4)
    assert first.trace == second.trace
    assert first.trace_hash == second.trace_hash != other.trace_hash
