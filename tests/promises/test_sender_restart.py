"""A sender may end anywhere and go on anywhere: the bucket, or any mirror of it, is all it needs."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from dcr_s3.errors import BadInput, Busy, CommitConflict, DcrError, Fenced
from dcr_s3.mirroring import open_mirror
from dcr_s3.reading import load_run
from dcr_s3.testing.checkpoints import changed
from dcr_s3.workers import InlineExecutor

Trial = Any
HERE = InlineExecutor()


def elsewhere(trial: Trial, **options: Any) -> Any:
    """The sender opened on another machine: no base, no baseline."""
    return trial.sender(base=None, state_dir=trial.root / "elsewhere", **options)


def test_on_another_machine_the_baseline_comes_from_a_snapshot_and_the_chain(trial: Trial) -> None:
    with trial.sender() as sender:
        trial.publish(sender)
        sender.snapshot()
        trial.publish(sender)
        trial.publish(sender)
    with elsewhere(trial) as sender:
        assert sender.position.version == 5
        report = trial.publish(sender)
        assert (report.version, report.wire_bytes < report.dense_bytes * 3) == (6, True)
    trial.receiver("one").pull()
    trial.assert_holds(6)


def test_without_a_snapshot_it_says_what_is_missing(trial: Trial) -> None:
    trial.run(2)
    with pytest.raises(BadInput, match="no snapshot: give the base"):
        elsewhere(trial)
    with trial.sender(state_dir=trial.root / "elsewhere") as sender:
        trial.publish(sender)
    trial.receiver("one").pull()
    trial.assert_holds(4)


def test_the_baseline_can_come_from_a_mirror_at_any_version(trial: Trial) -> None:
    trial.run(3)
    trial.receiver("mirror").pull(to_version=2)
    with trial.sender(base=trial.root / "mirror", state_dir=trial.root / "elsewhere") as sender:
        trial.publish(sender)
    trial.assert_holds(2, "mirror")
    trial.receiver("one").pull()
    trial.assert_holds(5)


def test_a_mirror_in_use_is_not_copied(trial: Trial) -> None:
    trial.run(2)
    trial.receiver("mirror").pull()
    run, start = load_run(trial.store)
    mirror = open_mirror(trial.store, run, start, trial.root / "mirror", base=None, executor=HERE)
    with pytest.raises(Busy, match="mirror"):
        trial.sender(base=trial.root / "mirror", state_dir=trial.root / "elsewhere")
    mirror.close()
    trial.sender(base=trial.root / "mirror", state_dir=trial.root / "elsewhere").close()


def test_a_base_of_no_version_is_refused(trial: Trial) -> None:
    trial.run(2)
    trial.receiver("mirror").pull()
    shutil.copytree(trial.root / "mirror", trial.root / "damaged")
    file = next((trial.root / "damaged").glob("*.safetensors"))
    body = bytearray(file.read_bytes())
    body[-1] ^= 1
    file.write_bytes(body)
    with pytest.raises(BadInput, match="its bits are of no version"):
        trial.sender(base=trial.root / "damaged", state_dir=trial.root / "elsewhere")


def test_a_trainer_that_went_back_to_an_older_checkpoint_publishes_that_as_the_next_version(trial: Trial) -> None:
    with trial.sender() as sender:
        for _ in range(3):
            trial.publish(sender)
        trial.receiver("one").pull()
    with trial.sender() as sender:
        report = trial.publish(sender, changed(trial.states[2], 99, 0.01))
    trial.receiver("one").pull()
    trial.assert_holds(report.version)


def test_a_lagging_baseline_is_brought_up_to_date_first(trial: Trial) -> None:
    trial.run(1)
    with trial.sender(state_dir=trial.root / "elsewhere") as other:
        for _ in range(6):
            trial.publish(other)
    with trial.sender() as sender:
        assert sender.position.version == 9
        trial.publish(sender)
    trial.receiver("one").pull()
    trial.assert_holds(10)


def test_a_baseline_whose_chain_was_deleted_goes_by_a_snapshot(trial: Trial) -> None:
    trial.run(1)
    with trial.sender(state_dir=trial.root / "elsewhere") as other:
        for _ in range(6):
            trial.publish(other)
        other.snapshot()
    for version in (3, 4, 5):
        trial.store.delete(trial.listed(f"segments/{version:012d}/"))
    with trial.sender() as sender:
        trial.publish(sender)
    trial.receiver("new", base=None).pull()
    trial.assert_holds(10, "new")


def test_a_sender_that_was_presumed_dead_can_never_commit_again(trial: Trial) -> None:
    zombie = trial.sender()
    with trial.sender(state_dir=trial.root / "elsewhere") as sender:
        with pytest.raises(Fenced, match="must stop"):
            trial.publish(zombie, changed(trial.states[-1], 1, 0.1))
        with pytest.raises(DcrError, match="open the run again"):
            trial.publish(zombie)
        trial.publish(sender)
    zombie.close()
    trial.receiver("one").pull()
    trial.assert_holds(3)


def test_of_two_one_shot_publishers_one_is_told_to_open_again(trial: Trial) -> None:
    trial.run(1)
    slow = trial.sender(fence=False)
    with trial.sender(fence=False, state_dir=trial.root / "elsewhere") as fast:
        trial.publish(fast)
    with pytest.raises(CommitConflict, match="open the run again"):
        trial.publish(slow, changed(trial.states[-1], 5, 0.1))
    slow.close()
    with trial.sender(fence=False) as again:
        trial.publish(again)
    trial.receiver("one").pull()
    trial.assert_holds(3)
