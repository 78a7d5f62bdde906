"""When followers look."""

from __future__ import annotations

from dcr_s3.protocol.polling import ACTIVE_INTERVAL_S, Polling


def test_manifest_and_segment_are_looked_at_in_turn_while_nothing_happens() -> None:
    polling = Polling(2.0)
    for _ in range(3):
        assert polling.after_manifest(found=False, announced=True) == 2.0
        assert polling.at_segment
        assert polling.after_segment(found=False) == 2.0
        assert not polling.at_segment


def test_without_an_announcement_only_the_manifest_is() -> None:
    polling = Polling(2.0)
    assert polling.after_manifest(found=False, announced=False) == 2.0
    assert not polling.at_segment


def test_the_last_segment_is_followed_by_the_manifest_at_once() -> None:
    polling = Polling(2.0)
    polling.after_manifest(found=False, announced=True)
    assert polling.after_segment(found=True) == 0.0
    assert polling.at_segment
    assert polling.after_segment(found=False) == 0.0
    assert not polling.at_segment
    assert polling.after_manifest(found=False, announced=True) == ACTIVE_INTERVAL_S


def test_a_version_that_is_never_finished_costs_ever_less() -> None:
    polling = Polling(2.0)
    polling.after_manifest(found=False, announced=True)
    polling.after_segment(found=True)
    polling.after_segment(found=False)
    waits = []
    for _ in range(20):
        waits.append(polling.after_manifest(found=False, announced=True))
        polling.after_segment(found=False)
    assert waits == sorted(waits)
    assert waits[0] == ACTIVE_INTERVAL_S
    assert waits[12:] == [2.0] * 8
    polling.after_manifest(found=False, announced=True)
    polling.after_segment(found=True)
    polling.after_segment(found=False)
    assert polling.after_manifest(found=False, announced=True) == ACTIVE_INTERVAL_S
    assert polling.after_manifest(found=True, announced=True) == 0.0
    assert polling.after_manifest(found=False, announced=True) == 2.0
