"""Every order and every fault of small scenarios."""

from __future__ import annotations

from dcr_s3.testing.sim import Tiny, explore_tiny

SEVERE = frozenset({"lost_reply", "late_conflict", "crash"})


def test_one_sender_and_one_receiver_with_any_fault_keep_every_promise() -> None:
    found = explore_tiny(Tiny(faults=1))
    assert found.runs > 100


def test_one_sender_and_one_receiver_with_two_faults_keep_every_promise() -> None:
    found = explore_tiny(Tiny(faults=2, menu=SEVERE, disk=False))
    assert found.runs > 70


def test_two_senders_with_one_fault_commit_every_version_once() -> None:
    found = explore_tiny(Tiny(senders=2, receivers=0, faults=1, menu=SEVERE, disk=False))
    assert found.runs > 30
