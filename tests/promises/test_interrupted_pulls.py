"""An interrupted pull: what was fetched is not fetched again, and what cannot be used again does no harm."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from dcr_s3.errors import StoreUnavailable
from dcr_s3.format.keys import SEGMENT_PREFIX
from dcr_s3.sending.segments import SegmentSizes
from dcr_s3.testing.checkpoints import changed
from dcr_s3.world import World, living_in

Trial = Any


class Killed(BaseException):
    """Stands for SIGKILL."""


def publish(trial: Trial) -> None:
    """One version of a segment for every type of cells."""
    with trial.sender(fence=False) as sender:
        trial.publish(sender, fraction=0.5)
    assert len(trial.listed(SEGMENT_PREFIX)) > 4


class Rebooted(World):
    def boot_id(self) -> str:
        return "another"


@pytest.fixture(autouse=True)
def _many_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcr_s3.sender.SegmentSizes", lambda **_: SegmentSizes(least_bytes=1, dense_bytes=1))


def interrupt(trial: Trial, error: type[BaseException], after: int) -> Counter[str]:
    """The read after ``after`` segments fails once; counts how often each segment was read in full."""
    read = trial.store.read_into
    reads: Counter[str] = Counter()
    failed: list[str] = []

    def failing(key: str, start: int, buffer: memoryview) -> None:
        if key.startswith(SEGMENT_PREFIX) and len(reads) == after and not failed:
            failed.append(key)
            raise error("here")
        read(key, start, buffer)
        reads[key] += 1

    trial.store.read_into = failing
    return reads


@pytest.mark.parametrize("error", [Killed, StoreUnavailable])
@pytest.mark.parametrize("after", [1, 3])
def test_no_segment_is_fetched_twice(trial: Trial, error: type[BaseException], after: int) -> None:
    publish(trial)
    trial.receiver("one").pull(to_version=0)
    reads = interrupt(trial, error, after)
    with pytest.raises(error):
        trial.receiver("one").pull()
    trial.assert_holds(0)
    trial.receiver("one").pull()
    trial.assert_holds(1)
    assert len(reads) > 3
    assert set(reads.values()) == {1}
    assert [p.name for p in (trial.root / "one" / ".dcr").glob("*.staged")] == []


def test_a_follower_that_waits_out_store_trouble_fetches_only_the_rest(trial: Trial) -> None:
    publish(trial)
    trial.receiver("one").pull(to_version=0)
    reads = interrupt(trial, StoreUnavailable, 2)
    trial.receiver("one").follow(until_version=1, poll_interval_s=0.01)
    trial.assert_holds(1)
    assert set(reads.values()) == {1}


def test_after_a_reboot_nothing_that_was_not_durable_is_used(trial: Trial) -> None:
    publish(trial)
    trial.receiver("one").pull(to_version=0)
    reads = interrupt(trial, Killed, 3)
    with pytest.raises(Killed):
        trial.receiver("one").pull()
    for path in (trial.root / "one" / ".dcr").glob("*.redo"):
        path.write_bytes(b"\0" * path.stat().st_size)
    with living_in(Rebooted()):
        trial.receiver("one").pull()
    trial.assert_holds(1)
    assert max(reads.values()) == 2


@pytest.mark.parametrize("suffix", [".redo", ".staged"])
def test_damaged_leftovers_are_not_used(trial: Trial, suffix: str) -> None:
    publish(trial)
    trial.receiver("one").pull(to_version=0)
    interrupt(trial, Killed, 3)
    with pytest.raises(Killed):
        trial.receiver("one").pull()
    for path in (trial.root / "one" / ".dcr").glob(f"*{suffix}"):
        path.write_bytes(path.read_bytes()[:-1])
    trial.receiver("one").pull()
    trial.assert_holds(1)


def test_what_was_staged_for_one_version_is_not_used_for_another(trial: Trial) -> None:
    publish(trial)
    trial.receiver("one").pull(to_version=0)
    interrupt(trial, Killed, 3)
    with pytest.raises(Killed):
        trial.receiver("one").pull()
    with trial.sender(fence=False) as sender:
        for seed in range(3):
            trial.publish(sender, changed(trial.states[-1], 30 + seed, 0.02))
        sender.snapshot()
    report = trial.receiver("one").pull()
    assert report.version == 4
    trial.assert_holds(4)
    trial.receiver("one").pull()
    assert list((trial.root / "one" / ".dcr").glob("*.redo")) == []
