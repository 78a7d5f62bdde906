"""Joint commit: a version is released once every required receiver has proved it, and never taken back."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dcr_s3.errors import BadInput, NotAcknowledged
from dcr_s3.format.ack import Ack
from dcr_s3.format.keys import RELEASE_KEY, ack_key
from dcr_s3.joint import read_release

Trial = Any


def test_waiting_ends_when_the_named_receivers_have_proved_the_version(trial: Trial) -> None:
    with trial.sender() as sender:
        report = trial.publish(sender)
        trial.receiver("one").pull()
        trial.receiver("two").pull()
        assert sender.wait_for(report.version, ["one", "two"], timeout_s=0) == ["one", "two"]
        assert sender.wait_for(report.version, 2, timeout_s=0) == ["one", "two"]
        assert sender.wait_for(report.version, timeout_s=0) == ["one", "two"]


def test_a_missing_receiver_is_named_in_the_error(trial: Trial) -> None:
    with trial.sender() as sender:
        trial.receiver("late").pull()
        report = trial.publish(sender)
        trial.receiver("one").pull()
        with pytest.raises(
            NotAcknowledged, match=r"version 2 is not proved by absent \(never heard of, or left\), late"
        ):
            sender.wait_for(report.version, ["one", "late", "absent"], timeout_s=0)
        with pytest.raises(NotAcknowledged, match="late \\(at version 1\\), 1 that nobody has heard of"):
            sender.wait_for(report.version, 3, timeout_s=0)


def test_a_receiver_whose_lease_ended_holds_nobody_up_until_it_comes_back(trial: Trial) -> None:
    with trial.sender() as sender:
        trial.receiver("gone", lease_s=60).pull()
        trial.age(61, ack_key("gone"))
        report = trial.publish(sender)
        trial.receiver("one").pull()
        assert sender.wait_for(report.version, timeout_s=0) == ["one"]
        with pytest.raises(NotAcknowledged, match=r"gone \(at version 1, silent for 6\d s, its lease is over\)"):
            sender.wait_for(report.version, ["gone"], timeout_s=0)
        trial.receiver("gone").pull()
        assert sender.wait_for(report.version, timeout_s=0) == ["gone", "one"]


def test_a_receiver_that_left_is_waited_for_no_more(trial: Trial) -> None:
    with trial.sender() as sender:
        leaver = trial.receiver("leaver")
        leaver.pull()
        trial.receiver("one").pull()
        report = trial.publish(sender)
        trial.receiver("one").pull()
        with pytest.raises(NotAcknowledged, match="leaver"):
            sender.wait_for(report.version, timeout_s=0)
        leaver.leave()
        assert sender.wait_for(report.version, timeout_s=0) == ["one"]
        leaver.pull()
        assert sender.wait_for(report.version, timeout_s=0) == ["leaver", "one"]


def test_a_claim_of_other_bits_is_no_proof(trial: Trial) -> None:
    with trial.sender() as sender:
        report = trial.publish(sender)
        trial.receiver("one").pull()
        body = trial.store.get(ack_key("one"), limit_bytes=10_000).body
        claim = Ack.from_bytes(body, where="").model_copy(update={"state": "0" * 32})
        trial.store.put(ack_key("one"), claim.to_bytes())
        with pytest.raises(NotAcknowledged, match="one \\(claims version 2 with other bits\\)"):
            sender.wait_for(report.version, ["one"], timeout_s=0)


def test_an_acknowledgement_under_another_name_does_not_count(trial: Trial) -> None:
    with trial.sender() as sender:
        report = trial.publish(sender)
        trial.receiver("one").pull()
        trial.store.put(ack_key("two"), trial.store.get(ack_key("one"), limit_bytes=10_000).body)
        trial.store.put(ack_key("three"), b"{}")
        with pytest.raises(NotAcknowledged, match="two"):
            sender.wait_for(report.version, ["one", "two"], timeout_s=0)


def test_release_waits_for_all_required_and_never_goes_back(trial: Trial) -> None:
    with trial.sender() as sender:
        first, second = trial.publish(sender), trial.publish(sender)
        with pytest.raises(BadInput, match="proved by nobody"):
            sender.release(first.version)
        trial.receiver("one").pull(to_version=first.version)
        with pytest.raises(NotAcknowledged, match="two"):
            sender.release(first.version, ["one", "two"])
        assert RELEASE_KEY not in trial.listed()
        assert sender.release(first.version, ["one"]).proved_by == ("one",)
        trial.receiver("one").pull()
        assert sender.release(second.version).version == second.version
        assert sender.release(first.version).version == second.version
        assert read_release(trial.store, sender.run.run_id)[0].version == second.version


def test_two_releases_at_once_leave_the_newer_one(trial: Trial) -> None:
    with trial.sender() as sender:
        for _ in range(6):
            trial.publish(sender)
        trial.receiver("one").pull()
        threads = [threading.Thread(target=sender.release, args=(v,)) for v in (3, 7, 2, 5, 4, 6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert read_release(trial.store, sender.run.run_id)[0].version == 7


def test_a_receiver_of_released_versions_applies_no_other(trial: Trial) -> None:
    with trial.sender() as sender:
        careful = trial.receiver("careful", released_only=True)
        first, _ = trial.publish(sender), trial.publish(sender)
        careful.pull()
        trial.assert_holds(0, "careful")
        trial.receiver("one").pull(to_version=first.version)
        sender.release(first.version, ["one"])
        assert careful.pull().version == first.version
        trial.assert_holds(first.version, "careful")
        with pytest.raises(NotAcknowledged, match="version 3 is not released; 2 is"):
            careful.pull(to_version=3)


def test_a_follower_of_released_versions_stops_at_the_release(trial: Trial) -> None:
    with trial.sender() as sender:
        first, _ = trial.publish(sender), trial.publish(sender)
        trial.receiver("one").pull(to_version=first.version)
        sender.release(first.version, ["one"])
        careful = trial.receiver("careful", released_only=True)
        reports: list[Any] = []
        careful.follow(reports.append, until_version=first.version, poll_interval_s=0.01)
        assert reports[-1].version == first.version
        trial.assert_holds(first.version, "careful")


def test_a_follower_of_released_versions_goes_with_the_release_until_its_goal(trial: Trial) -> None:
    with trial.sender() as sender:
        for _ in range(2):
            trial.publish(sender)
        trial.receiver("one").pull()
        sender.release(2, ["one"])
        versions: list[int] = []

        def release_next(report: Any) -> None:
            versions.append(report.version)
            if report.version == 2:
                sender.release(3, ["one"])

        careful = trial.receiver("careful", released_only=True)
        careful.follow(release_next, until_version=3, poll_interval_s=0.01)
    assert versions[-2:] == [2, 3]
    trial.assert_holds(3, "careful")


def test_a_follower_renews_its_lease_while_nothing_is_new(trial: Trial) -> None:
    trial.run(1)
    stop = threading.Event()
    follower = trial.receiver("one", lease_s=1)
    thread = threading.Thread(target=follower.follow, kwargs={"stop": stop, "poll_interval_s": 0.01})
    thread.start()
    etags = set()
    try:
        for _ in range(2000):
            if ack_key("one") in trial.listed():
                etags.add(trial.store.head(ack_key("one")).etag)
            if len(etags) > 2:
                break
            stop.wait(0.01)
    finally:
        stop.set()
        thread.join()
    assert len(etags) > 2
