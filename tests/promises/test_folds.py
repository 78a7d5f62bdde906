"""Folds: versions a to b as one delta. The bits are those of b, and nothing that changed back is sent."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr_s3.delta import Changes
from dcr_s3.errors import ChainBroken, StateMismatch
from dcr_s3.folding import Folder
from dcr_s3.format.keys import fold_key
from dcr_s3.format.region import Region
from dcr_s3.mirroring import open_mirror
from dcr_s3.reading import load_run
from dcr_s3.retention import gc
from dcr_s3.store.metered import MeteredStore
from dcr_s3.targets.undo import UndoLog
from dcr_s3.testing.checkpoints import changed
from dcr_s3.workers import InlineExecutor

Trial = Any
HERE = InlineExecutor()


def fold(trial: Trial, name: str = "folder", to_version: int | None = None, store: Any = None) -> Any:
    run, start = load_run(trial.store)
    mirror = open_mirror(trial.store, run, start, trial.root / name, base=trial.root / "base", executor=HERE)
    with closing(mirror):
        folder = Folder(store or trial.store, run, start, mirror, coders=HERE, movers=HERE)
        return folder.fold(to_version=to_version)


def run_with_history(trial: Trial, versions: int = 6, **options: Any) -> None:
    """Every version changes some cells anew and takes some of the changes before back."""
    with trial.sender(fence=False, **options) as sender:
        for number in range(versions):
            new = changed(trial.states[-1], 50 + number, 0.05)
            if number % 2:
                new["layer.0.q"] = trial.states[-2]["layer.0.q"]
            trial.publish(sender, new)


@pytest.mark.parametrize("context", [True, False])
def test_a_fold_leads_to_the_same_bits(trial: Trial, context: bool) -> None:
    run_with_history(trial, context=context)
    made = fold(trial)
    assert (made.first.version, made.last.version) == (0, 6)
    trial.assert_holds(6, "folder")
    for version in range(1, 7):
        trial.store.delete(trial.listed(f"segments/{version:012d}/"))
    report = trial.receiver("late").pull()
    assert (report.from_version, report.version) == (0, 6)
    trial.assert_holds(6, "late")


def test_cells_that_changed_back_are_not_in_a_fold(trial: Trial) -> None:
    with trial.sender(fence=False) as sender:
        trial.publish(sender)
        trial.publish(sender)
        trial.publish(sender, trial.states[1])
    trial.receiver("folder").pull(to_version=1)
    made = fold(trial)
    assert (made.first.version, made.last.version, made.segments) == (1, 3, ())
    assert made.first.state == made.last.state
    assert made.statistics.changed_elements == 0


def test_a_fold_is_smaller_than_the_chain_and_the_planner_takes_it(trial: Trial) -> None:
    with trial.sender(fence=False) as sender:
        for number in range(12):
            # The same few tensors change again and again, so that a fold has much less to say than the chain.
            new = dict(trial.states[-1])
            new["embed"] = changed(trial.states[-1], number, 0.5)["embed"]
            trial.publish(sender, new)
    made = fold(trial)
    metered = MeteredStore(trial.store)
    receiver = trial.receiver("late")
    receiver._url = metered
    report = receiver.pull()
    trial.assert_holds(12, "late")
    assert report.wire_bytes < 2 * made.statistics.segment_bytes + 4000
    assert metered.meter.traffic.requests["read"] == len(made.segments)


def test_a_chain_of_folds_and_deltas(trial: Trial) -> None:
    run_with_history(trial, 8)
    assert fold(trial, to_version=3).last.version == 3
    assert fold(trial, to_version=6).first.version == 3
    for version in range(1, 7):
        trial.store.delete(trial.listed(f"segments/{version:012d}/"))
    trial.receiver("late").pull()
    trial.assert_holds(8, "late")
    trial.receiver("middle").pull(to_version=3)
    trial.assert_holds(3, "middle")
    with pytest.raises(ChainBroken):
        trial.receiver("between").pull(to_version=5)


def test_less_than_two_versions_are_not_folded(trial: Trial) -> None:
    trial.run(1)
    assert fold(trial) is None
    assert trial.listed("folds/") == []
    trial.assert_holds(1, "folder")


def test_a_fold_is_made_once(trial: Trial) -> None:
    run_with_history(trial)
    first = fold(trial)
    before = trial.listed()
    assert fold(trial, "again") == first
    assert trial.listed() == before


def test_of_two_folders_one_wins_and_nothing_is_mixed(trial: Trial) -> None:
    run_with_history(trial)
    first = fold(trial)
    manifest = trial.bucket.objects.pop(fold_key(0, 6))
    segments = trial.listed("folds/")
    put = trial.store.put

    def slower(key: str, body: bytes, **condition: Any) -> str:
        if key == fold_key(0, 6):
            trial.bucket.objects[key] = manifest
        return put(key, body, **condition)

    trial.store.put = slower
    assert fold(trial, "other") == first
    assert trial.listed("folds/") == sorted([*segments, fold_key(0, 6)])


def test_an_interrupted_fold_is_harmless(trial: Trial) -> None:
    run_with_history(trial)
    put = trial.store.put

    def failing(key: str, body: bytes, **condition: Any) -> str:
        if key == fold_key(0, 6):
            raise KeyboardInterrupt
        return put(key, body, **condition)

    trial.store.put = failing
    with pytest.raises(KeyboardInterrupt):
        fold(trial)
    trial.store.put = put
    left = trial.listed("folds/")
    assert fold_key(0, 6) not in left
    trial.receiver("late").pull()
    trial.assert_holds(6, "late")
    trial.age(2 * 86_400.0)
    trial.receiver("late").pull()
    report = gc(trial.store, uncommitted_only=True, dry_run=False, workers=0)
    assert [o.key for o in report.objects] == left
    assert fold(trial, "another").last.version == 6


def test_a_damaged_mirror_makes_no_fold(trial: Trial) -> None:
    run_with_history(trial)
    run, start = load_run(trial.store)
    mirror = open_mirror(trial.store, run, start, trial.root / "bad", base=trial.root / "base", executor=HERE)
    with closing(mirror):
        folder = Folder(trial.store, run, start, mirror, coders=HERE, movers=HERE)
        restore = UndoLog.restore

        def wrong(log: UndoLog, tensor: int, begin: int, cells: Any) -> None:
            restore(log, tensor, begin, cells)
            cells[0] ^= 1

        UndoLog.restore = wrong
        try:
            with pytest.raises(StateMismatch, match="from version 0 to 6"):
                folder.fold()
        finally:
            UndoLog.restore = restore
    assert trial.listed("folds/") == []


def test_a_fold_of_another_past_is_left_out(trial: Trial) -> None:
    run_with_history(trial)
    made = fold(trial)
    wrong = made.model_copy(update={"last": made.last.model_copy(update={"sha256": "0" * 64})})
    trial.store.put(fold_key(0, 6), wrong.to_bytes())
    trial.receiver("late").pull()
    trial.assert_holds(6, "late")
    trial.store.put(fold_key(0, 6), b"{}")
    trial.receiver("later").pull()
    trial.assert_holds(6, "later")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_undoing_gives_the_first_bits_of_any_piece(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    cells = data.draw(st.integers(1, 60))
    now = np.random.default_rng(cells).integers(0, 1 << 16, cells).astype("<u2")
    first = now.copy()
    flat = Region.run(0, 0, cells)
    columns = Region(0, 0, (2, cells // 2), (1, 2))
    path: Path = tmp_path_factory.mktemp("undo") / "x.undo"
    with closing(UndoLog(path)) as undo:
        for _ in range(data.draw(st.integers(0, 5))):
            region = columns if cells >= 2 and data.draw(st.booleans()) else flat
            chosen = sorted(data.draw(st.sets(st.integers(0, region.cells - 1), min_size=1)))
            positions = np.array(chosen, np.uint32)
            places = region.canonical(positions)
            new = (now[places] ^ np.uint16(data.draw(st.integers(1, 9)))).astype("<u2")
            undo.record([region], Changes(positions, now[places], new))
            now[places] = new
        begin = data.draw(st.integers(0, cells))
        end = data.draw(st.integers(begin, cells))
        piece = now[begin:end].copy()
        undo.restore(0, begin, piece)
        assert np.array_equal(piece, first[begin:end])
        if not undo.touched(0, begin, end):
            assert np.array_equal(now[begin:end], first[begin:end])
    assert not path.exists()
