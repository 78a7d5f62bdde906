"""Catching up: the cheapest way by bytes, every step proved by digests; whoever may exist converges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from dcr_s3.errors import BadInput, ChainBroken, CorruptObject, StateMismatch
from dcr_s3.format.keys import SNAPSHOT_PREFIX, snapshot_marker_key
from dcr_s3.receiver import verify_directory
from dcr_s3.snapshots import find_snapshot, publish_snapshot
from dcr_s3.store.metered import MeteredStore
from dcr_s3.targets.directory import DirectoryMirror
from dcr_s3.testing.checkpoints import SHAPES, changed, differing, load, make_state, save
from dcr_s3.ways import FAR_BEHIND
from dcr_s3.workers import InlineExecutor

Trial = Any
HERE = InlineExecutor()


def snapshot(trial: Trial, version: int, name: str = "maker") -> None:
    """Brings a mirror to a version and publishes it."""
    from dcr_s3.reading import load_run

    trial.receiver(name, acknowledge=False).pull(to_version=version)
    mirror = DirectoryMirror.open(trial.root / name, load_run(trial.store)[0])
    publish_snapshot(trial.store, mirror, HERE)
    mirror.close()


def forget(trial: Trial, *versions: int) -> None:
    """Deletes the segments of some versions."""
    for version in versions:
        trial.store.delete(trial.listed(f"segments/{version:012d}/"))


def test_a_new_receiver_needs_nothing_but_the_address(trial: Trial) -> None:
    trial.run(3)
    snapshot(trial, 2)
    report = trial.receiver("new", base=None).pull()
    assert (report.from_version, report.version) == (2, 3)
    trial.assert_holds(3, "new")


def test_a_new_receiver_without_snapshot_or_base_is_told_what_to_do(trial: Trial) -> None:
    trial.run(1)
    with pytest.raises(BadInput, match="give the base with --base"):
        trial.receiver("new", base=None).pull()


def test_a_snapshot_is_an_ordinary_checkpoint(trial: Trial, tmp_path: Path) -> None:
    trial.run(2)
    snapshot(trial, 2)
    found = find_snapshot(trial.store, trial.sender(fence=False).run.run_id, 2)
    for file in found.files:
        body = trial.bucket.objects[found.key(file)].body
        (tmp_path / "copy").mkdir(exist_ok=True)
        (tmp_path / "copy" / file.name).write_bytes(body)
    assert differing(load(tmp_path / "copy"), trial.states[2]) == []
    index = json.loads((tmp_path / "copy" / "model.safetensors.index.json").read_text())
    tensors = {n: t for f in set(index["weight_map"].values()) for n, t in load_file(tmp_path / "copy" / f).items()}
    assert tensors.keys() == SHAPES.keys()


def test_a_snapshot_is_made_once_and_only_of_proved_bits(trial: Trial) -> None:
    from dcr_s3.reading import load_run

    trial.run(1)
    snapshot(trial, 1)
    before = trial.listed()
    snapshot(trial, 1)
    assert trial.listed() == before
    mirror = DirectoryMirror.open(trial.root / "maker", load_run(trial.store)[0])
    trial.store.delete([snapshot_marker_key(1)])
    mirror.cells(0)[3] ^= 1
    with pytest.raises(StateMismatch, match="embed"):
        publish_snapshot(trial.store, mirror, HERE)
    mirror.close()
    assert snapshot_marker_key(1) not in trial.listed()


def test_of_two_writers_of_a_snapshot_one_wins_and_nothing_is_mixed(trial: Trial) -> None:
    trial.run(1)
    snapshot(trial, 1)
    first = trial.bucket.objects.pop(snapshot_marker_key(1))
    files = trial.listed(SNAPSHOT_PREFIX)
    put = trial.store.put

    def slower(key: str, body: bytes, **condition: Any) -> str:
        if key == snapshot_marker_key(1):
            trial.bucket.objects[key] = first
        return put(key, body, **condition)

    trial.store.put = slower
    snapshot(trial, 1, "other")
    assert sorted(trial.listed(SNAPSHOT_PREFIX)) == sorted([*files, snapshot_marker_key(1)])
    assert trial.bucket.objects[snapshot_marker_key(1)] == first


def test_an_interrupted_snapshot_is_harmless(trial: Trial) -> None:
    trial.run(1)
    put = trial.store.put

    def failing(key: str, body: bytes, **condition: Any) -> str:
        if key.endswith("config.json"):
            raise KeyboardInterrupt
        return put(key, body, **condition)

    trial.store.put = failing
    with pytest.raises(KeyboardInterrupt):
        snapshot(trial, 1)
    trial.store.put = put
    with pytest.raises(BadInput, match="has no snapshot"):
        trial.receiver("new", base=None).pull()
    snapshot(trial, 1, "other")
    assert trial.receiver("new", base=None).pull().version == 1
    trial.assert_holds(1, "new")


def test_a_tampered_snapshot_is_refused(trial: Trial) -> None:
    trial.run(1)
    snapshot(trial, 1)
    key = next(k for k in trial.listed(SNAPSHOT_PREFIX) if k.endswith(".safetensors"))
    body = bytearray(trial.bucket.objects[key].body)
    body[-1] ^= 1
    trial.store.put(key, body)
    with pytest.raises(CorruptObject, match=key):
        trial.receiver("new", base=None).pull()


def test_an_interrupted_download_keeps_the_files_it_has(trial: Trial) -> None:
    trial.run(1)
    snapshot(trial, 1)
    read = trial.store.read_into
    reads: list[str] = []

    def failing(key: str, start: int, buffer: memoryview) -> None:
        reads.append(key)
        if len(reads) == 2:
            raise KeyboardInterrupt
        read(key, start, buffer)

    trial.store.read_into = failing
    with pytest.raises(KeyboardInterrupt):
        trial.receiver("new", base=None).pull()
    trial.receiver("new", base=None).pull()
    trial.assert_holds(1, "new")
    assert reads.count(reads[0]) == 1


def test_a_receiver_whose_chain_was_deleted_goes_by_a_snapshot(trial: Trial) -> None:
    trial.run(6)
    trial.receiver("late").pull(to_version=1)
    snapshot(trial, 4)
    forget(trial, 2, 3)
    report = trial.receiver("late").pull()
    assert report.version == 6
    trial.assert_holds(6, "late")
    assert verify_directory(trial.store, trial.root / "late", workers=0).version == 6
    assert list((trial.root / "late" / ".dcr").glob("*.state")) == []


def test_a_follower_whose_next_version_was_deleted_goes_by_a_snapshot(trial: Trial) -> None:
    trial.run(3)
    trial.receiver("late").pull(to_version=1)
    snapshot(trial, 3)
    forget(trial, 2)
    trial.receiver("late").follow(until_version=3, poll_interval_s=0.01)
    trial.assert_holds(3, "late")


def test_a_chain_that_is_broken_for_good_is_said_clearly_and_changes_nothing(trial: Trial) -> None:
    trial.run(5)
    trial.receiver("late").pull(to_version=1)
    forget(trial, 3)
    with pytest.raises(ChainBroken, match="no way leads from version 1 to 5"):
        trial.receiver("late").pull()
    trial.assert_holds(1, "late")
    forget(trial, 2)
    with pytest.raises(ChainBroken, match=r"no way leads from version 1 to 5 .*publish one from a mirror"):
        trial.receiver("late").pull()


def test_a_snapshot_replaces_even_damaged_bits(trial: Trial) -> None:
    trial.run(5)
    trial.receiver("late").pull(to_version=1)
    file = next((trial.root / "late").glob("*.safetensors"))
    raw = np.memmap(file, np.uint8, "r+")
    raw[-3] ^= 1
    raw.flush()
    snapshot(trial, 5)
    forget(trial, 2)
    trial.receiver("late").pull()
    trial.assert_holds(5, "late")


def test_one_version_behind_costs_no_listing(trial: Trial) -> None:
    trial.run(2)
    trial.receiver("one").pull(to_version=1)
    metered = MeteredStore(trial.store)
    receiver = trial.receiver("one")
    receiver._url = metered
    receiver.pull()
    requests = metered.meter.traffic.requests
    assert requests["list"] == 0
    assert requests["get"] == 3  # the run, the next manifest, the one after it
    trial.assert_holds(2)


def test_far_behind_finds_the_snapshot_cheaper_than_the_chain(trial: Trial) -> None:
    trial.run(1)
    with trial.sender(fence=False) as sender:
        for seed in range(FAR_BEHIND + 2):
            trial.publish(sender, make_state(100 + seed))
    newest = len(trial.states) - 1
    trial.receiver("late").pull(to_version=1)
    snapshot(trial, newest)
    metered = MeteredStore(trial.store)
    receiver = trial.receiver("late")
    receiver._url = metered
    report = receiver.pull()
    found = find_snapshot(trial.store, trial.sender(fence=False).run.run_id, newest)
    assert report.wire_bytes == found.size_bytes
    trial.assert_holds(newest, "late")


def test_the_address_of_another_run_is_refused(trial: Trial) -> None:
    trial.run(2)
    trial.receiver("one").pull()
    trial.store.delete(trial.listed())
    save(changed(trial.states[0], 77), trial.root / "base", shards=2)
    trial.run(3)
    with pytest.raises(BadInput, match="mirrors run"):
        trial.receiver("one").pull()
