"""Engines that keep no mirror: one rank or several, each fetching what it holds, proved together."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from dcr_s3 import Receiver, Sender
from dcr_s3.errors import ApplyExpired, BadInput, ReplicaUnfit, StateMismatch, WrongBase
from dcr_s3.ranks import LocalRank
from dcr_s3.resident import ResidentReceiver
from dcr_s3.store.memory import MemoryStore
from dcr_s3.targets.engine.apply import NoGate

sys.path.insert(0, str(Path(__file__).parent))
import toys
from groups import Group, engine_of, loaded, published

KINDS = [toys.Fused, toys.Transposed, toys.Padded, toys.Converting, toys.Buffering, toys.Tied]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", [True, False])
@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_one_rank_ends_with_the_bits_of_a_fresh_engine(
    kind: type[toys.Toy], context: bool, mode: Any, memory_store: MemoryStore, tmp_path: Path
) -> None:
    state, sender = published(kind, memory_store, tmp_path / "base", context=context)
    toy = loaded(kind(), state)
    receiver = ResidentReceiver(
        memory_store, LocalRank(engine_of(toy)), str(tmp_path / "base"), mode=mode, verify="full"
    )
    receiver.pull()
    for seed in range(3):
        state = toys.changed(state, seed, share=0.2 if seed < 2 else 0.9)
        sender.publish(state)
        receiver.pull()
        assert receiver.version == sender.position.version
        assert toys.bits(toy) == toys.bits(loaded(kind(), state))
        assert receiver.verify().state_digest == sender.position.state
    sender.close()


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_two_ranks_together_hold_the_version(mode: Any, memory_store: MemoryStore, tmp_path: Path) -> None:
    state, sender = published(toys.Split, memory_store, tmp_path / "base", context=False)
    ranks = [loaded(toys.Split(rank), state) for rank in (0, 1)]
    group = Group(*ranks)
    receiver = ResidentReceiver(memory_store, group, str(tmp_path / "base"), mode=mode, verify="full")
    receiver.pull()
    for seed in range(4):
        state = toys.changed(state, seed, share=0.2 if seed < 3 else 0.9)
        sender.publish(state)
        (report,) = receiver.pull()
        assert len(report.rank_wire_bytes) == 2
        for rank, toy in enumerate(ranks):
            assert toys.bits(toy) == toys.bits(loaded(toys.Split(rank), state))
    assert group.served[-1] == receiver.version == sender.position.version
    ranks[1].columns.data[0, 0] = 3.0
    with pytest.raises(StateMismatch, match="does not hold version 5 in tensor columns: its ranks' digests add up"):
        receiver.verify()
    sender.close()


def test_a_rank_that_fails_takes_all_ranks_back(memory_store: MemoryStore, tmp_path: Path) -> None:
    state, sender = published(toys.Split, memory_store, tmp_path / "base", context=False)
    ranks = [loaded(toys.Split(rank), state) for rank in (0, 1)]
    group = Group(*ranks)
    receiver = ResidentReceiver(memory_store, group, str(tmp_path / "base"))
    version = receiver.open()
    new = toys.changed(state, 1)
    sender.publish(new)
    group.fails[1, "apply"] = ApplyExpired("too slow")
    with pytest.raises(ApplyExpired, match="rank 1: too slow"):
        receiver.pull()
    assert receiver.version == version
    for rank, toy in enumerate(ranks):
        assert toys.bits(toy) == toys.bits(loaded(toys.Split(rank), state))
    group.fails.clear()
    receiver.pull()
    for rank, toy in enumerate(ranks):
        assert toys.bits(toy) == toys.bits(loaded(toys.Split(rank), new))
    group.fails[0, "apply"] = group.fails[1, "undo"] = RuntimeError("gone")
    sender.publish(toys.changed(new, 2))
    for _ in range(2):
        with pytest.raises(ReplicaUnfit):
            receiver.pull()
    sender.close()


def test_the_gate_stays_closed_for_writes_alone_or_for_all(memory_store: MemoryStore, tmp_path: Path) -> None:
    state, sender = published(toys.Fused, memory_store, tmp_path / "base", context=False)
    events: list[str] = []

    class Watching(NoGate):
        def close(self) -> None:
            events.append("close")

        def open(self) -> None:
            events.append("open")

    class Telling(LocalRank):
        def call(self, method: str, *arguments: Any) -> list[Any]:
            events.append(method)
            return super().call(method, *arguments)

    for mode, expected in (
        ("asynchronous", ["stage", "close", "apply", "open"]),
        ("synchronous", ["close", "stage", "apply", "open"]),
    ):
        ranks = Telling(engine_of(loaded(toys.Fused(), state)))
        receiver = ResidentReceiver(memory_store, ranks, str(tmp_path / "base"), gate=Watching(), mode=mode)
        receiver.pull()
        events.clear()
        if mode == "asynchronous":
            sender.publish(toys.changed(state, 1))
            receiver.pull()
        else:
            receiver = ResidentReceiver(memory_store, ranks, str(tmp_path / "base"), gate=Watching(), mode=mode)
            sender.publish(toys.changed(toys.changed(state, 1), 2))
            receiver.pull()
        assert [e for e in events if e not in ("status", "open", "assign", "digests", "settle")] == [
            e for e in expected if e != "open"
        ]
        assert [e for e in events if e != "settle"][-1] == "open"
    sender.close()


def test_an_engine_of_other_weights_and_foreign_writes_are_noticed(memory_store: MemoryStore, tmp_path: Path) -> None:
    state, sender = published(toys.Fused, memory_store, tmp_path / "base", context=False)
    other = loaded(toys.Fused(), toys.random_state(toys.Fused, seed=4))
    with pytest.raises(BadInput, match="was it loaded from this run"):
        ResidentReceiver(memory_store, LocalRank(engine_of(other)), str(tmp_path / "base")).open()
    toy = loaded(toys.Fused(), state)
    gate = Mock(spec=NoGate)
    receiver = ResidentReceiver(memory_store, LocalRank(engine_of(toy)), str(tmp_path / "base"), gate=gate)
    receiver.pull()
    sender.publish(toys.changed(state, 1, share=1.0))
    norm = toy.norm.data
    toy.norm.data = norm.clone()
    with pytest.raises(StateMismatch, match="engine tensor norm: its storage moved"):
        receiver.verify()
    with pytest.raises(StateMismatch, match="engine tensor norm: its storage moved"):
        receiver.pull()
    toy.norm.data = norm
    receiver.verify()
    norm.zero_()
    with pytest.raises(StateMismatch, match="the engine does not hold version 1 in tensor norm:"):
        receiver.verify()
    with pytest.raises(WrongBase, match=r"something else wrote to it. Load it anew \(tensor norm\)"):
        receiver.pull()
    gate.close.assert_not_called()
    sender.close()


def test_a_follower_that_starts_again_finds_the_version(memory_store: MemoryStore, tmp_path: Path) -> None:
    state, sender = published(toys.Split, memory_store, tmp_path / "base", context=False)
    group = Group(*(loaded(toys.Split(rank), state) for rank in (0, 1)))
    ResidentReceiver(memory_store, group, str(tmp_path / "base")).pull()
    sender.publish(toys.changed(state, 1))
    ResidentReceiver(memory_store, group, str(tmp_path / "base")).pull()
    again = ResidentReceiver(memory_store, group, str(tmp_path / "base"), verify="full")
    assert again.open() == sender.position.version
    sender.publish(toys.changed(state, 2))
    again.pull()
    assert again.version == sender.position.version
    sender.close()


class Half(toys.Toy):
    """One rank of two, of a size at which deltas are cut into several blocks."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        for name in ("a", "b"):
            weight = torch.zeros(2048, 4096, dtype=torch.bfloat16)
            self.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))

    def place(self, name: str, tensor: torch.Tensor) -> None:
        getattr(self, name).data.copy_(tensor.narrow(0, 2048 * self.rank, 2048))


class Stage(toys.Toy):
    """One stage of two: one of two tensors."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.name = "ab"[rank]
        weight = torch.zeros(4096, 4096, dtype=torch.bfloat16)
        self.register_parameter(self.name, torch.nn.Parameter(weight, requires_grad=False))

    def place(self, name: str, tensor: torch.Tensor) -> None:
        if name == self.name:
            getattr(self, name).data.copy_(tensor)


def test_a_stage_fetches_only_its_layers(memory_store: MemoryStore, tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    state = {n: torch.randn(4096, 4096, generator=rng).to(torch.bfloat16) for n in ("a", "b")}
    (tmp_path / "base").mkdir()
    save_file(state, tmp_path / "base" / "model.safetensors")
    sender = Sender.open(memory_store, base=state, workers=0)
    stages = [loaded(Stage(rank), state) for rank in (0, 1)]
    receiver = ResidentReceiver(memory_store, Group(*stages), str(tmp_path / "base"))
    receiver.pull()
    new = {n: torch.where(torch.rand(t.shape, generator=rng) < 0.01, -t, t) for n, t in state.items()}
    published_report = sender.publish(new)
    (report,) = receiver.pull()
    assert [r["skipped"] for r in receiver.routes] == [1, 1]
    assert all(wire < 0.6 * published_report.wire_bytes for wire in report.rank_wire_bytes)
    assert torch.equal(stages[0].a.data, new["a"])
    assert torch.equal(stages[1].b.data, new["b"])
    assert receiver.verify().state_digest == sender.position.state
    sender.close()


@pytest.mark.parametrize("context", [True, False])
def test_a_rank_fetches_only_what_it_holds(context: bool, memory_store: MemoryStore, tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    state = {n: torch.randn(4096, 4096, generator=rng).to(torch.bfloat16) for n in ("a", "b")}
    (tmp_path / "base").mkdir()
    save_file(state, tmp_path / "base" / "model.safetensors")
    sender = Sender.open(memory_store, base=state, context=context, workers=0)
    ranks = [loaded(Half(rank), state) for rank in (0, 1)]
    receiver = ResidentReceiver(memory_store, Group(*ranks), str(tmp_path / "base"))
    receiver.pull()
    # Small values change more often than large ones, as in training; a coding with context makes use of that.
    new = {
        n: torch.where((torch.rand(t.shape, generator=rng) < 0.1) & (t.abs() < 0.2), t * 1.01, t)
        for n, t in state.items()
    }
    published_report = sender.publish(new)
    if context:
        with pytest.raises(BadInput, match="--context-free"):
            receiver.pull()
    else:
        (report,) = receiver.pull()
        assert all(wire < 0.6 * published_report.wire_bytes for wire in report.rank_wire_bytes)
        assert torch.equal(ranks[1].b.data, new["b"][2048:])
    sender.close()


@pytest.mark.parametrize("shape", [(64, 96), (7, 5), (1, 9)])
def test_matrices_cut_into_parts_give_the_same_bits(
    shape: tuple[int, int], memory_store: MemoryStore, tmp_path: Path
) -> None:
    rng = torch.Generator().manual_seed(1)
    state = {"m": torch.randn(shape, generator=rng).to(torch.bfloat16), "v": torch.ones(5)}
    (tmp_path / "dir").mkdir()
    save_file(state, tmp_path / "dir" / "model.safetensors")
    sender = Sender.open(memory_store, base=state, context=False, parts=2, workers=0)
    new = toys.changed(state, 3)
    sender.publish(new)
    Receiver(memory_store, tmp_path / "dir", workers=0).pull()
    assert torch.equal(
        load_file(tmp_path / "dir" / "model.safetensors")["m"].view(torch.int16), new["m"].view(torch.int16)
    )
    sender.close()
