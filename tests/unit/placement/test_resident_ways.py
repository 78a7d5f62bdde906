"""Engines without a mirror on every way that a bucket offers, as members of a run, and after a driver that died."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dcr_s3 import Receiver
from dcr_s3.errors import BadInput, ChainBroken, CorruptObject, NotAcknowledged, ObjectGone, ReplicaUnfit
from dcr_s3.format.keys import SNAPSHOT_PREFIX, ack_key
from dcr_s3.ranks import LocalRank
from dcr_s3.resident import ResidentReceiver
from dcr_s3.snapshots import find_snapshot
from dcr_s3.store.memory import MemoryStore
from dcr_s3.targets.engine.apply import NoGate
from dcr_s3.targets.engine.bound import BoundEngine
from dcr_s3.upkeep import make_fold, make_snapshot

sys.path.insert(0, str(Path(__file__).parent))
import toys
from groups import Group, engine_of, loaded, published

MODES = ["asynchronous", "synchronous"]


def prune(store: MemoryStore, versions: range) -> None:
    for version in versions:
        store.delete([o.key for o in store.list(f"segments/{version:012d}/")])


class Closing(NoGate):
    """Notes what happens to the gate."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def close(self) -> None:
        self.events.append("close")

    def open(self) -> None:
        self.events.append("open")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [toys.Fused, toys.Transposed, toys.Converting, toys.Buffering, toys.Tied])
def test_far_behind_an_engine_takes_a_fold(
    kind: type[toys.Toy], mode: Any, memory_store: MemoryStore, tmp_path: Path
) -> None:
    state, sender = published(kind, memory_store, tmp_path / "base", context=True)
    toy = loaded(kind(), state)
    receiver = ResidentReceiver(
        memory_store, LocalRank(engine_of(toy)), str(tmp_path / "base"), mode=mode, verify="full"
    )
    receiver.pull()
    make_fold(memory_store, tmp_path / "mirror", base=tmp_path / "base", workers=0)
    first = receiver.version
    for seed in range(5):
        state = toys.changed(state, seed)
        sender.publish(state)
    make_fold(memory_store, tmp_path / "mirror", workers=0)
    (report,) = receiver.pull()
    assert (report.kind, report.from_version, report.version) == ("fold", first, sender.position.version)
    assert toys.bits(toy) == toys.bits(loaded(kind(), state))
    assert receiver.verify().state_digest == sender.position.state
    sender.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [toys.Fused, toys.Transposed, toys.Converting, toys.Buffering, toys.Tied])
def test_where_the_chain_was_deleted_an_engine_takes_a_snapshot(
    kind: type[toys.Toy], mode: Any, memory_store: MemoryStore, tmp_path: Path
) -> None:
    state, sender = published(kind, memory_store, tmp_path / "base", context=True)
    toy = loaded(kind(), state)
    receiver = ResidentReceiver(
        memory_store, LocalRank(engine_of(toy)), str(tmp_path / "base"), mode=mode, verify="full"
    )
    first = receiver.open()
    for seed in range(3):
        state = toys.changed(state, seed)
        sender.publish(state)
    Receiver(memory_store, tmp_path / "mirror", base=tmp_path / "base", acknowledge=False, workers=0).pull()
    make_snapshot(memory_store, tmp_path / "mirror", workers=0)
    state = toys.changed(state, 3)
    sender.publish(state)
    prune(memory_store, range(first + 1, sender.position.version))
    reports = receiver.pull()
    assert [r.kind for r in reports] == ["snapshot", "delta"]
    assert toys.bits(toy) == toys.bits(loaded(kind(), state))
    assert receiver.verify().state_digest == sender.position.state
    sender.close()


@pytest.mark.parametrize("mode", MODES)
def test_ranks_with_a_part_each_take_folds_and_snapshots(mode: Any, memory_store: MemoryStore, tmp_path: Path) -> None:
    state, sender = published(toys.Split, memory_store, tmp_path / "base", context=False)
    ranks = [loaded(toys.Split(rank), state) for rank in (0, 1)]
    receiver = ResidentReceiver(memory_store, Group(*ranks), str(tmp_path / "base"), mode=mode, verify="full")
    receiver.pull()
    make_fold(memory_store, tmp_path / "mirror", base=tmp_path / "base", workers=0)
    for seed in range(5):
        state = toys.changed(state, seed)
        sender.publish(state)
    make_fold(memory_store, tmp_path / "mirror", workers=0)
    (folded,) = receiver.pull()
    state = toys.changed(state, 6)
    sender.publish(state)
    make_fold(memory_store, tmp_path / "mirror", workers=0)
    make_snapshot(memory_store, tmp_path / "mirror", workers=0)
    prune(memory_store, range(sender.position.version, sender.position.version + 1))
    (whole,) = receiver.pull()
    assert (folded.kind, whole.kind) == ("fold", "snapshot")
    for rank, toy in enumerate(ranks):
        assert toys.bits(toy) == toys.bits(loaded(toys.Split(rank), state))
    sender.close()


def test_a_damaged_snapshot_changes_nothing(memory_store: MemoryStore, tmp_path: Path) -> None:
    state, sender = published(toys.Fused, memory_store, tmp_path / "base", context=True)
    toy = loaded(toys.Fused(), state)
    gate = Closing()
    receiver = ResidentReceiver(memory_store, LocalRank(engine_of(toy)), str(tmp_path / "base"), gate=gate)
    receiver.pull()
    first = sender.position.version
    sender.publish(toys.changed(state, 1))
    Receiver(memory_store, tmp_path / "mirror", base=tmp_path / "base", acknowledge=False, workers=0).pull()
    make_snapshot(memory_store, tmp_path / "mirror", workers=0)
    prune(memory_store, range(first + 1, sender.position.version + 1))
    snapshot = find_snapshot(memory_store, sender.run.run_id, sender.position.version)
    assert snapshot is not None
    (file,) = (f for f in snapshot.files if f.name.endswith(".safetensors"))
    body = bytearray(file.size_bytes)
    memory_store.read_into(snapshot.key(file), 0, memoryview(body))
    body[-1] ^= 1
    memory_store.put(snapshot.key(file), body)
    with pytest.raises(CorruptObject, match="do not have the digest"):
        receiver.pull()
    memory_store.delete([o.key for o in memory_store.list(SNAPSHOT_PREFIX)])
    with pytest.raises(ChainBroken, match="there is no snapshot"):
        receiver.pull()
    assert receiver.version == first
    assert toys.bits(toy) == toys.bits(loaded(toys.Fused(), state))
    assert gate.events == []
    sender.close()


def test_what_is_deleted_while_the_gate_is_closed_leads_to_another_way(
    memory_store: MemoryStore, tmp_path: Path
) -> None:
    state, sender = published(toys.Fused, memory_store, tmp_path / "base", context=True)
    toy = loaded(toys.Fused(), state)
    gate = Closing()
    receiver = ResidentReceiver(
        memory_store, LocalRank(engine_of(toy)), str(tmp_path / "base"), gate=gate, mode="synchronous"
    )
    receiver.pull()
    first = sender.position.version
    state = toys.changed(state, 1)
    sender.publish(state)
    Receiver(memory_store, tmp_path / "mirror", base=tmp_path / "base", acknowledge=False, workers=0).pull()
    make_snapshot(memory_store, tmp_path / "mirror", workers=0)
    prune(memory_store, range(first + 1, sender.position.version + 1))
    (report,) = receiver.pull()
    assert report.kind == "snapshot"
    assert gate.events == ["close", "open", "close", "open"]
    assert toys.bits(toy) == toys.bits(loaded(toys.Fused(), state))
    sender.close()


def test_a_named_engine_acknowledges_what_it_holds(memory_store: MemoryStore, tmp_path: Path) -> None:
    state, sender = published(toys.Split, memory_store, tmp_path / "base", context=False)
    ranks = [loaded(toys.Split(rank), state) for rank in (0, 1)]
    silent = ResidentReceiver(memory_store, Group(*ranks), str(tmp_path / "base"))
    silent.pull()
    assert [o.key for o in memory_store.list("acks/")] == []
    group = Group(*ranks)
    receiver = ResidentReceiver(memory_store, group, str(tmp_path / "base"), name="engine-1")
    receiver.pull()
    report = sender.publish(toys.changed(state, 1))
    group.fails[1, "apply"] = CorruptObject("no")
    with pytest.raises(CorruptObject):
        receiver.pull()
    with pytest.raises(NotAcknowledged, match="engine-1"):
        sender.wait_for(report.version, ["engine-1"], timeout_s=0)
    group.fails.clear()
    receiver.pull()
    assert sender.wait_for(report.version, ["engine-1"], timeout_s=0) == ["engine-1"]
    assert [o.key for o in memory_store.list("acks/")] == [ack_key("engine-1")]
    sender.close()


def test_a_following_engine_acknowledges_and_waits_for_the_release(memory_store: MemoryStore, tmp_path: Path) -> None:
    state, sender = published(toys.Fused, memory_store, tmp_path / "base", context=True)
    toy = loaded(toys.Fused(), state)
    receiver = ResidentReceiver(
        memory_store, LocalRank(engine_of(toy)), str(tmp_path / "base"), name="engine", released_only=True
    )
    witness = Receiver(memory_store, tmp_path / "mirror", base=tmp_path / "base", name="witness", workers=0)
    witness.pull()
    sender.release(sender.position.version, ["witness"])
    receiver.pull()
    new = toys.changed(state, 1)
    version = sender.publish(new).version
    assert receiver.pull() == []
    with pytest.raises(NotAcknowledged, match=f"version {version} is not released"):
        receiver.pull(to_version=version)
    assert toys.bits(toy) == toys.bits(loaded(toys.Fused(), state))
    witness.pull()
    sender.release(version, ["witness"])
    told: list[int] = []
    receiver.follow(lambda report: told.append(report.version), until_version=version, poll_interval_s=0.01)
    assert told == [version]
    assert toys.bits(toy) == toys.bits(loaded(toys.Fused(), new))
    assert sender.wait_for(version, ["engine"], timeout_s=0)
    sender.close()


def test_a_version_that_is_not_there_is_said(memory_store: MemoryStore, tmp_path: Path) -> None:
    state, sender = published(toys.Fused, memory_store, tmp_path / "base", context=True)
    receiver = ResidentReceiver(memory_store, LocalRank(engine_of(loaded(toys.Fused(), state))), str(tmp_path / "base"))
    with pytest.raises(ChainBroken, match="version 9 is not committed"):
        receiver.pull(to_version=9)
    sender.close()


def test_following_ends_after_the_version_in_hand(memory_store: MemoryStore, tmp_path: Path) -> None:
    state, sender = published(toys.Fused, memory_store, tmp_path / "base", context=True)
    toy = loaded(toys.Fused(), state)
    receiver = ResidentReceiver(memory_store, LocalRank(engine_of(toy)), str(tmp_path / "base"))
    receiver.pull()
    first = toys.changed(state, 1)
    sender.publish(first)
    sender.publish(toys.changed(first, 2))
    stop = threading.Event()
    receiver.follow(lambda report: stop.set(), stop, poll_interval_s=0.01)
    assert toys.bits(toy) == toys.bits(loaded(toys.Fused(), first))
    sender.close()


class Died(BaseException):
    """The driver is gone: nothing that it would still do happens."""


def test_what_a_dead_driver_left_half_done_is_ended_by_the_next(
    memory_store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, sender = published(toys.Split, memory_store, tmp_path / "base", context=False)
    ranks = [loaded(toys.Split(rank), state) for rank in (0, 1)]
    group = Group(*ranks)
    first = ResidentReceiver(memory_store, group, str(tmp_path / "base"))
    first.pull()
    new = toys.changed(state, 1)
    sender.publish(new)
    monkeypatch.setattr(ResidentReceiver, "_put_back", lambda *_: None)
    group.fails[1, "apply"] = Died()
    with pytest.raises(Died):
        first.pull()
    assert toys.bits(ranks[0]) == toys.bits(loaded(toys.Split(0), new))
    group.fails.clear()
    gate = Closing()
    second = ResidentReceiver(memory_store, group, str(tmp_path / "base"), gate=gate, verify="full")
    second.open()
    for rank, toy in enumerate(ranks):
        assert toys.bits(toy) == toys.bits(loaded(toys.Split(rank), state))
    assert gate.events == ["open"]
    second.pull()
    for rank, toy in enumerate(ranks):
        assert toys.bits(toy) == toys.bits(loaded(toys.Split(rank), new))
    gate.events.clear()
    newer = toys.changed(new, 2)
    sender.publish(newer)
    group.fails[0, "settle"] = Died()
    with pytest.raises(Died):
        second.pull()
    group.fails.clear()
    third = ResidentReceiver(memory_store, group, str(tmp_path / "base"), gate=gate)
    assert third.open() == sender.position.version
    assert gate.events == ["close", "open", "open"]
    assert group.served[-1] == sender.position.version
    sender.close()


def test_an_engine_that_was_closed_stays_so_for_the_next_driver(
    memory_store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, sender = published(toys.Fused, memory_store, tmp_path / "base", context=True)
    group = Group(loaded(toys.Fused(), state))
    receiver = ResidentReceiver(memory_store, group, str(tmp_path / "base"))
    receiver.pull()
    sender.publish(toys.changed(state, 1))

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(BoundEngine, "check_written", fail)
    monkeypatch.setattr(BoundEngine, "undo", fail)
    with pytest.raises(ReplicaUnfit):
        receiver.pull()
    monkeypatch.undo()
    with pytest.raises(ReplicaUnfit, match="rank 0 is closed"):
        ResidentReceiver(memory_store, group, str(tmp_path / "base")).open()
    sender.close()


def test_an_engine_that_follows_one_run_is_not_moved_to_another(memory_store: MemoryStore, tmp_path: Path) -> None:
    state, sender = published(toys.Fused, memory_store, tmp_path / "base", context=True)
    group = Group(loaded(toys.Fused(), state))
    ResidentReceiver(memory_store, group, str(tmp_path / "base")).open()
    sender.close()
    other = MemoryStore()
    published(toys.Fused, other, tmp_path / "other", context=True)[1].close()
    with pytest.raises(BadInput, match="start the engine anew"):
        ResidentReceiver(other, group, str(tmp_path / "other")).open()


def test_a_fold_that_goes_away_is_said_by_its_rank(memory_store: MemoryStore, tmp_path: Path) -> None:
    state, sender = published(toys.Fused, memory_store, tmp_path / "base", context=True)
    ranks = LocalRank(engine_of(loaded(toys.Fused(), state)))
    receiver = ResidentReceiver(memory_store, ranks, str(tmp_path / "base"))
    version = receiver.open()
    sender.publish(toys.changed(state, 1))
    for kind in ("fold", "snapshot"):
        (status,) = ranks.call("stage", kind, version + 1)
        assert status["error_kind"] == ObjectGone.__name__
    sender.close()
