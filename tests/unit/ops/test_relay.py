"""Relays: a target is a run like its source, whatever order things happen in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from safetensors.numpy import save_file

from dcr_s3 import Receiver, Sender, init_run, verify_directory
from dcr_s3.errors import BadInput, CorruptObject, RunExists, RunMissing
from dcr_s3.format.keys import manifest_key
from dcr_s3.format.manifest import Manifest
from dcr_s3.relay import Relay
from dcr_s3.store import Store
from dcr_s3.store.memory import MemoryStore
from dcr_s3.store.metered import MeteredStore
from dcr_s3.store.nearby import NearbyStore
from dcr_s3.store.wrapped import Request, WrappedStore
from dcr_s3.upkeep import make_fold

R = TypeVar("R")


def write_checkpoint(directory: Path, seed: int, *, cells: int = 60_000) -> Path:
    directory.mkdir(parents=True)
    start = np.random.default_rng(0).integers(0, 1 << 16, (2, cells), np.uint16)
    changed = np.random.default_rng(seed).integers(0, cells, seed * cells // 50)
    start[:, changed] ^= 1
    save_file({"a.weight": start[0].reshape(-1, 100), "b.weight": start[1]}, directory / "model.safetensors")
    return directory


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "base", 0)


@pytest.fixture
def source(base: Path, tmp_path: Path) -> MemoryStore:
    """A run with its base in the bucket and three versions."""
    store = MemoryStore()
    init_run(store, base, upload_base=True, state_dir=tmp_path / "state", workers=0)
    publish(store, tmp_path, 1, 2, 3)
    return store


def publish(store: MemoryStore, tmp_path: Path, *seeds: int) -> None:
    with Sender.open(store, state_dir=tmp_path / "state", fence=False, workers=0) as sender:
        for seed in seeds:
            sender.publish(write_checkpoint(tmp_path / f"new-{seed}", seed), step=seed)


def objects(store: MemoryStore) -> dict[str, bytes]:
    found = {}
    for entry in store.list(""):
        if not entry.key.startswith("acks/"):
            one = store.get(entry.key, limit_bytes=1 << 30)
            assert one is not None
            found[entry.key] = one.body
    return found


def test_a_target_becomes_the_same_run(source: MemoryStore, tmp_path: Path) -> None:
    target = MemoryStore()
    report = Relay(source, [target]).copy()
    assert objects(target) == objects(source)
    assert (report.version, report.versions) == (3, 3)
    Receiver(target, tmp_path / "mirror", workers=0).pull()
    assert verify_directory(source, tmp_path / "mirror", workers=0).version == 3


def test_only_what_is_new_is_copied_again(source: MemoryStore, tmp_path: Path) -> None:
    target = MemoryStore()
    Relay(source, [target]).copy()
    publish(source, tmp_path, 4)
    report = Relay(source, [target]).copy()
    assert (report.version, report.versions) == (4, 1)
    entry = source.get(manifest_key(4), limit_bytes=1 << 20)
    assert entry is not None
    segment_bytes = Manifest.from_bytes(entry.body, where="").statistics.segment_bytes
    assert segment_bytes < report.up_bytes < segment_bytes + 10_000


def test_a_region_costs_one_copy_however_many_receivers(source: MemoryStore, tmp_path: Path) -> None:
    across = MeteredStore(source)
    region = MemoryStore()
    Relay(across, [region]).copy()
    crossed = across.meter.traffic.down_bytes
    for number in range(4):
        Receiver(region, tmp_path / f"mirror-{number}", workers=0).pull()
    assert across.meter.traffic.down_bytes == crossed
    assert crossed < 1.05 * sum(map(len, objects(source).values())) + 10_000


def test_fan_out_and_trees(source: MemoryStore) -> None:
    first, second, third = MemoryStore(), MemoryStore(), MemoryStore()
    metered = MeteredStore(source)
    Relay(metered, [first, second]).copy()
    assert metered.meter.traffic.down_bytes < 1.05 * sum(map(len, objects(source).values())) + 10_000
    Relay(second, [third]).copy()
    assert objects(first) == objects(second) == objects(third) == objects(source)


def test_targets_at_different_versions_meet(source: MemoryStore, tmp_path: Path) -> None:
    early, late = MemoryStore(), MemoryStore()
    Relay(source, [early]).copy()
    publish(source, tmp_path, 4, 5)
    assert Relay(source, [late, early]).copy().version == 5
    assert objects(early) == objects(late) == objects(source)


def test_several_relays_with_one_target_do_no_harm(source: MemoryStore) -> None:
    target = MemoryStore()
    relays = [threading.Thread(target=Relay(source, [target], name=f"relay-{n}").copy) for n in range(4)]
    for relay in relays:
        relay.start()
    for relay in relays:
        relay.join()
    assert objects(target) == objects(source)


def test_follow_copies_while_the_sender_works(source: MemoryStore, tmp_path: Path) -> None:
    target = MemoryStore()
    relay = threading.Thread(
        target=lambda: Relay(source, [target]).follow(until_version=6, poll_interval_s=0.01), daemon=True
    )
    relay.start()
    publish(source, tmp_path, 4, 5, 6)
    relay.join(timeout=60)
    assert objects(target) == objects(source)


class _Gate(WrappedStore):
    """Holds a put of ``key`` back until the gate is opened, and opens ``other``'s gate on a put below ``prefix``."""

    def __init__(self, inner: Store, *, key: str = "", prefix: str = "never", opens: threading.Event) -> None:
        super().__init__(inner)
        self.key, self.prefix, self.event = key, prefix, opens

    def around(self, request: Request, send: Callable[[Request], R]) -> R:
        if request.kind == "put" and request.key == self.key:
            assert self.event.wait(timeout=60)
        result = send(request)
        if request.kind == "put" and request.key.startswith(self.prefix):
            self.event.set()
        return result


def test_segments_are_copied_before_their_commit(source: MemoryStore, tmp_path: Path) -> None:
    target = MemoryStore()
    arrived = threading.Event()
    seen_at_target = _Gate(target, prefix="segments/000000000005/", opens=arrived)
    commits_late = _Gate(source, key=manifest_key(5), opens=arrived)
    relay = threading.Thread(
        target=lambda: Relay(source, [seen_at_target]).follow(until_version=5, poll_interval_s=0.01), daemon=True
    )
    relay.start()
    with Sender.open(commits_late, state_dir=tmp_path / "state", workers=0) as sender:
        sender.publish(write_checkpoint(tmp_path / "new-5", 5))
    relay.join(timeout=60)
    assert objects(target) == objects(source)


def test_damage_is_not_passed_on(source: MemoryStore) -> None:
    key = next(o.key for o in source.list("segments/000000000002/"))
    body = bytearray(objects(source)[key])
    body[len(body) // 2] ^= 1
    source.put(key, body)
    target = MemoryStore()
    with pytest.raises(CorruptObject, match=key):
        Relay(source, [target]).copy()
    assert manifest_key(1) in objects(target)
    assert manifest_key(2) not in objects(target)
    assert key not in objects(target)


def test_another_run_at_the_target(source: MemoryStore, base: Path, tmp_path: Path) -> None:
    target = MemoryStore()
    init_run(target, base, state_dir=tmp_path / "other", workers=0)
    with pytest.raises(RunExists, match=r"run\.json"):
        Relay(source, [target]).copy()
    with pytest.raises(RunMissing):
        Relay(MemoryStore(), [target]).copy()


def test_a_source_that_has_dropped_old_versions(source: MemoryStore, tmp_path: Path) -> None:
    source.delete([manifest_key(1)])
    target = MemoryStore()
    assert Relay(source, [target]).copy().versions == 2
    assert objects(target).keys() >= {manifest_key(2), manifest_key(3)}


def test_the_relay_acknowledges_at_the_source(source: MemoryStore) -> None:
    Relay(source, [MemoryStore()], name="relay-eu").copy()
    assert [o.key for o in source.list("acks/")] == ["acks/relay-eu.json"]
    Relay(source, [MemoryStore()], name="quiet", acknowledge=False).copy()
    assert [o.key for o in source.list("acks/")] == ["acks/relay-eu.json"]


def test_folds_are_copied(source: MemoryStore, base: Path, tmp_path: Path) -> None:
    assert make_fold(source, tmp_path / "folder", base=base, workers=0).made
    target = MemoryStore()
    Relay(source, [target]).copy()
    assert any(o.key.startswith("folds/") for o in target.list(""))
    assert objects(target) == objects(source)


def test_a_receiver_reads_the_copy_and_stays_a_member_of_the_run(source: MemoryStore, tmp_path: Path) -> None:
    copy, home = MemoryStore(), MeteredStore(source)
    Relay(source, [copy], acknowledge=False).copy()
    receiver = Receiver(NearbyStore(home, [copy]), tmp_path / "mirror", name="far-away", workers=0)
    assert receiver.pull().version == 3
    assert home.meter.traffic.down_bytes == len(objects(source)["run.json"])
    assert [o.key for o in source.list("acks/")] == ["acks/far-away.json"]
    assert list(copy.list("acks/")) == []
    publish(source, tmp_path, 4)  # and the relay has stopped
    hasty = Receiver(NearbyStore(home, [copy], patience_s=0.0), tmp_path / "mirror", name="far-away", workers=0)
    assert hasty.pull().version == 4
    assert verify_directory(source, tmp_path / "mirror", workers=0).version == 4


def segments_of(store: MemoryStore, version: int) -> list[str]:
    return [o.key for o in store.list(f"segments/{version:012d}/")]


@pytest.fixture
def folded(source: MemoryStore, base: Path, tmp_path: Path) -> tuple[MemoryStore, MemoryStore]:
    """A source at version 8 with a fold from 3 to 7, and a target at version 3."""
    target = MemoryStore()
    Receiver(source, tmp_path / "folder", base=base, workers=0).pull()
    Relay(source, [target]).copy()
    publish(source, tmp_path, 4, 5, 6, 7)
    assert make_fold(source, tmp_path / "folder", workers=0).last == 7
    publish(source, tmp_path, 8)
    return source, target


def test_a_target_that_is_far_behind_gets_the_fold(folded: tuple[MemoryStore, MemoryStore], tmp_path: Path) -> None:
    source, target = folded
    late, early = tmp_path / "late", tmp_path / "early"
    Receiver(target, early, workers=0).pull()
    report = Relay(source, [target], fold_behind=4).copy()
    assert (report.version, report.versions) == (8, 5)
    assert [len(segments_of(target, v)) for v in range(4, 9)] == [0, 0, 0, 0, len(segments_of(source, 8))]
    for mirror in (early, late):
        assert Receiver(target, mirror, workers=0).pull().version == 8
        assert verify_directory(source, mirror, workers=0).version == 8


def test_one_that_is_not_gets_every_version(folded: tuple[MemoryStore, MemoryStore]) -> None:
    source, target = folded
    Relay(source, [target], fold_behind=6).copy()
    assert objects(target) == objects(source)


def test_a_receiver_follows_over_the_fold(folded: tuple[MemoryStore, MemoryStore], tmp_path: Path) -> None:
    source, target = folded
    receiver = Receiver(target, tmp_path / "mirror", workers=0)
    follower = threading.Thread(
        target=receiver.follow, kwargs={"until_version": 8, "poll_interval_s": 0.001}, daemon=True
    )
    follower.start()
    Relay(source, [target], fold_behind=4).copy()
    follower.join(timeout=60)
    assert verify_directory(source, tmp_path / "mirror", workers=0).version == 8


class _Breaking(WrappedStore):
    """The relay dies at its ``left``th write."""

    def __init__(self, inner: Store, left: int) -> None:
        super().__init__(inner)
        self.left = left

    def around(self, request: Request, send: Callable[[Request], R]) -> R:
        if request.kind == "put":
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
        return send(request)


def test_a_relay_that_dies_while_it_follows_a_fold(folded: tuple[MemoryStore, MemoryStore], tmp_path: Path) -> None:
    source, target = folded
    Receiver(target, tmp_path / "mirror", workers=0).pull()
    left = 0
    while True:
        try:
            Relay(source, [_Breaking(target, left)], fold_behind=4, acknowledge=False).copy()
            break
        except KeyboardInterrupt:
            left += 1
            assert Receiver(target, tmp_path / "mirror", workers=0).pull().version in (3, 7, 8)
    assert Receiver(target, tmp_path / "mirror", workers=0).pull().version == 8
    assert verify_directory(source, tmp_path / "mirror", workers=0).version == 8


def test_a_fold_of_one_version_is_refused() -> None:
    with pytest.raises(BadInput, match="fold_behind is 1"):
        Relay(MemoryStore(), [MemoryStore()], fold_behind=1)


def test_a_fold_from_the_very_beginning(base: Path, tmp_path: Path) -> None:
    source, target = MemoryStore(), MemoryStore()
    init_run(source, base, upload_base=True, state_dir=tmp_path / "state", workers=0)
    publish(source, tmp_path, 1, 2, 3, 4)
    assert make_fold(source, tmp_path / "folder", base=base, workers=0).first == 0
    with pytest.raises(KeyboardInterrupt):
        Relay(source, [_Refusing(target, manifest_key(1))], fold_behind=4, acknowledge=False).copy()
    assert manifest_key(4) in objects(target)
    assert Relay(source, [target], fold_behind=4).copy().version == 4
    Receiver(target, tmp_path / "mirror", base=base, workers=0).pull()
    assert verify_directory(source, tmp_path / "mirror", workers=0).version == 4


class _Refusing(WrappedStore):
    """The relay dies when it writes ``key``."""

    def __init__(self, inner: Store, key: str) -> None:
        super().__init__(inner)
        self.key = key

    def around(self, request: Request, send: Callable[[Request], R]) -> R:
        if request.kind == "put" and request.key == self.key:
            raise KeyboardInterrupt
        return send(request)
