"""Long runs of the real code, with every fault there is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from dcr_s3.testing.sim import joint_scenario, run_seed

WITHOUT_REPLY = frozenset({"late", "lost_reply", "late_conflict"})


@pytest.mark.parametrize("seed", range(16))
def test_no_promise_is_broken_and_all_converge_once_faults_stop(seed: int) -> None:
    result = run_seed(seed)
    assert result.versions > 4
    assert result.crashes > 0


@pytest.mark.parametrize("seed", range(12))
def test_several_ranks_commit_together_or_not_at_all_and_only_what_was_proved_is_released(seed: int) -> None:
    with joint_scenario(seed) as scenario:
        result = scenario.run()
    assert result.versions > 4
    assert result.crashes > 0
    assert scenario.truth.released == result.versions


def test_replies_are_lost_while_parts_and_owners_lists_and_releases_are_written() -> None:
    parts = _struck(line for seed in (2, 6) for line in run_seed(seed, WITHOUT_REPLY, 0.2).trace)
    for request in ("open_multipart", "upload_part", "complete"):
        assert parts[request, "segments"] & WITHOUT_REPLY, request
    joint = _struck(line for s in range(4) for line in run_seed(s, WITHOUT_REPLY, 0.2, make=joint_scenario).trace)
    for place in (("put", "owners"), ("put", "manifests"), ("put", "release.json")):
        assert joint[place] & WITHOUT_REPLY, place


def _struck(trace: Iterable[str]) -> dict[tuple[str, str], set[str]]:
    """Which faults struck each kind of request to each kind of object."""
    found: dict[tuple[str, str], set[str]] = {}
    for words in (line.split() for line in trace):
        if len(words) >= 4:
            found.setdefault((words[2], words[3].partition("/")[0]), set()).update(words[4:])
    return found


@pytest.mark.parametrize("options", [{}, {"make": joint_scenario}], ids=["long", "joint"])
def test_the_same_seed_gives_the_same_trace(options: dict[str, Any]) -> None:
    first, second, other = run_seed(3, **options), run_seed(3, **options), run_seed(4, **options)
    assert first.trace == second.trace
    assert first.trace_hash == second.trace_hash != other.trace_hash
