"""Every order and every fault of small scenarios.

Two faults of any kinds take too long for every day: ``scripts/sim --explore --faults 2`` tries them all, with 218 runs
made to their end and 10,225 given up because another one shows the same, in 527,579 steps (ten minutes on busy cores).
"""

from __future__ import annotations

from dcr_s3.testing.sim import Tiny, explore_tiny

AT_REQUESTS = {"absent", "conflict", "crash", "crash_late", "duplicate", "flipped_bit", "late", "late_conflict"}
EVERY_KIND = AT_REQUESTS | {"lost_reply", "unavailable", "power_loss", "disk_full"}
"""Those that only take time are left out, as every order is tried anyway; a read cut short is an unavailable one."""
SEVERE = frozenset({"lost_reply", "late_conflict", "crash", "disk_full"})


def test_one_sender_and_one_receiver_with_any_fault_keep_every_promise() -> None:
    found = explore_tiny(Tiny(faults=1))
    assert found.faults.keys() == EVERY_KIND


def test_one_sender_and_one_receiver_with_two_faults_keep_every_promise() -> None:
    found = explore_tiny(Tiny(faults=2, menu=SEVERE))
    assert found.faults.keys() == SEVERE


def test_uploads_in_parts_keep_every_promise_with_any_fault() -> None:
    found = explore_tiny(Tiny(faults=1, parts=True))
    assert found.faults.keys() == EVERY_KIND


def test_two_senders_with_any_fault_commit_every_version_once() -> None:
    found = explore_tiny(Tiny(senders=2, receivers=0, faults=1))
    assert found.faults.keys() == EVERY_KIND
