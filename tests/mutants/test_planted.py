"""Every planted bug is found, and nothing is found where none was planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from dcr_s3.testing.sim import Tiny, Violation, explore_tiny, joint_scenario, run_seed
from dcr_s3.testing.sim.scenarios import Making, long_scenario
from tests.mutants import planted
from tests.mutants.flips import meet_flipped_bits


@dataclass(frozen=True)
class Hunt:
    """Where a bug is looked for: everything in a small scenario, long runs from seeds, or a ``probe`` of its own."""

    name: str
    tiny: Tiny | None = None
    seeds: tuple[int, ...] = ()
    menu: frozenset[str] | None = None
    fault_rate: float = 0.05
    make: Making = long_scenario
    probe: Callable[[], None] = lambda: None

    def go(self) -> None:
        """Raises ``Violation`` at the first one."""
        if self.tiny is not None:
            explore_tiny(self.tiny)
        for seed in self.seeds:
            run_seed(seed, self.menu, self.fault_rate, make=self.make)
        self.probe()


PAIR = Hunt(
    "pair", Tiny(faults=1, menu=frozenset({"unavailable", "lost_reply", "late_conflict", "crash", "disk_full"}))
)
DUEL = Hunt("duel", Tiny(senders=2, receivers=0, faults=0))
FENCED_DUEL = Hunt("fenced_duel", Tiny(senders=2, receivers=0, faults=0, fence=True))
FOLDING = Hunt("folding", Tiny(senders=0, receivers=0, keepers=1, earlier=2, menu=frozenset({"late"})))
UNPLUGGED = Hunt("unplugged", seeds=tuple(range(0, 16, 2)), menu=frozenset({"power_loss", "crash"}))
FLIPPED = Hunt("flipped", probe=meet_flipped_bits)
UPKEEP = Hunt("upkeep", seeds=tuple(range(1, 17, 2)))
PARTS = Hunt("parts", seeds=(2, 3, 6, 7), menu=frozenset({"unavailable"}), fault_rate=0.2)
JOINT = Hunt("joint", seeds=tuple(range(6)), make=joint_scenario)
LATE_JOINT = Hunt("late_joint", seeds=tuple(range(4)), menu=frozenset({"late"}), fault_rate=0.3, make=joint_scenario)
STALLED = Hunt("stalled", seeds=tuple(range(4)), menu=frozenset({"pause"}), fault_rate=0.1, make=joint_scenario)
CLEANING = Hunt("cleaning", Tiny(senders=0, receivers=0, keepers=1, cleaners=1, earlier=2, faults=0))

FOUND: dict[Callable[[pytest.MonkeyPatch], None], Hunt] = {
    planted.manifest_before_segments: PAIR,
    planted.lost_reply_taken_for_success: PAIR,
    planted.no_read_back: PAIR,
    planted.commit_without_condition: DUEL,
    planted.no_fence: FENCED_DUEL,
    planted.abort_after_unknown_outcome: PAIR,
    planted.fold_aborted_after_unknown_outcome: FOLDING,
    planted.baseline_moved_on_upload: PAIR,
    planted.keys_used_again: DUEL,
    planted.applied_before_proved: PAIR,
    planted.clean_before_applied: PAIR,
    planted.journal_not_synced: UNPLUGGED,
    planted.journal_not_repeated: PAIR,
    planted.journal_repeated_backwards: UNPLUGGED,
    planted.journal_dropped_before_cells_are_durable: UNPLUGGED,
    planted.renames_not_synced: UNPLUGGED,
    planted.acknowledged_before_applied: PAIR,
    planted.nothing_checked: FLIPPED,
    planted.fetched_ahead_trusted: FLIPPED,
    planted.no_grace: CLEANING,
    planted.retention_forgets_who_needs_what: UPKEEP,
    planted.lost_parts_not_noticed: PARTS,
    planted.owners_not_waited_for: JOINT,
    planted.any_attempts_list_taken: LATE_JOINT,
    planted.failed_owner_committed_without: JOINT,
    planted.follower_deletes_after_unknown_outcome: STALLED,
    planted.released_without_condition: LATE_JOINT,
    planted.released_without_proof: JOINT,
    planted.unreleased_applied: JOINT,
}


@pytest.mark.parametrize("plant", FOUND, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation) as found:
        FOUND[plant].go()
    assert "breaks down" not in str(found.value), "the plant itself is broken"


@pytest.mark.parametrize("hunt", dict.fromkeys(FOUND.values()), ids=lambda hunt: hunt.name)
def test_nothing_is_found_where_nothing_was_planted(hunt: Hunt) -> None:
    hunt.go()
