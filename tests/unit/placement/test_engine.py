"""Updates of engines with loaders of every kind: afterwards all bits are those of a fresh engine, or all as before."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dcr_s3.errors import ApplyExpired, BadInput, ReplicaUnfit, StateMismatch
from dcr_s3.format.cells import Cells
from dcr_s3.targets.engine.apply import Applier, NoGate
from dcr_s3.targets.engine.bound import BoundEngine, Engine, Update
from dcr_s3.targets.engine.changes import Changed
from dcr_s3.targets.module import ModuleTarget
from dcr_s3.targets.placement import Route
from dcr_s3.targets.storages import attribute_tensors, module_tensors

sys.path.insert(0, str(Path(__file__).parent))
import toys

KINDS = [toys.Fused, toys.Split, toys.Transposed, toys.Padded, toys.Converting, toys.Buffering, toys.Tied]


class Recording(NoGate):
    """Notes what happens to the gate."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def close(self) -> None:
        self.events.append("close")

    def open(self) -> None:
        self.events.append("open")

    def reset_caches(self) -> None:
        self.events.append("reset")


def engine_of(toy: toys.Toy) -> Engine:
    return Engine(toy.load_weights, lambda: module_tensors(toy), lambda: attribute_tensors(toy))


def canonical(state: toys.State) -> list[Cells]:
    return [toys.cells_of(t) for t in state.values()]


def loaded(kind: type[toys.Toy], state: toys.State) -> toys.Toy:
    toy = kind()
    toy.load_weights(state.items())
    return toy


def bound(kind: type[toys.Toy], state: toys.State) -> tuple[toys.Toy, BoundEngine]:
    toy = loaded(kind, state)
    return toy, BoundEngine(engine_of(toy), toys.specs_of(state), canonical(state).__getitem__)


def changes_between(old: toys.State, new: toys.State) -> dict[int, Changed]:
    result = {}
    for number, (before, after) in enumerate(zip(canonical(old), canonical(new), strict=True)):
        positions = np.flatnonzero(before != after).astype(np.int64)
        result[number] = Changed(positions, after[positions])
    return result


def staged(engine: BoundEngine, old: toys.State, new: toys.State) -> Update:
    return engine.stage(changes_between(old, new), canonical(old).__getitem__)


@pytest.mark.parametrize("kind", KINDS)
def test_updates_leave_the_bits_of_a_fresh_engine(kind: type[toys.Toy]) -> None:
    state = toys.random_state(kind)
    toy, engine = bound(kind, state)
    gate = Recording()
    applier = Applier(engine, gate, limit_s=30)
    for version in range(1, 5):
        new = toys.changed(state, version)
        update = staged(engine, state, new)
        assert toys.bits(toy) == toys.bits(loaded(kind, state))
        applier.apply([update], lambda update=update: engine.check_written(update))
        assert toys.bits(toy) == toys.bits(loaded(kind, new))
        engine.check_converted(canonical(new).__getitem__)
        state = new
    assert gate.events == ["close", "reset", "open"] * 4


def test_buffers_that_no_tensor_fills_are_left_alone() -> None:
    class Working(toys.Tied):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inverse_frequencies", torch.ones(4), persistent=False)

    state = toys.random_state(Working)
    toy, engine = bound(Working, state)
    toy.counter.add_(3)
    toy.inverse_frequencies.mul_(0.5)
    counter = toy.counter.clone()
    new = toys.changed(state, 1)
    Applier(engine, Recording(), limit_s=30).apply([staged(engine, state, new)], lambda: None)
    assert torch.equal(toy.counter, counter)
    assert torch.equal(toy.inverse_frequencies, torch.full((4,), 0.5))
    assert toys.bits(toy) != toys.bits(loaded(Working, state))


@pytest.mark.parametrize("kind", KINDS)
def test_undo_puts_every_bit_back(kind: type[toys.Toy]) -> None:
    state = toys.random_state(kind)
    toy, engine = bound(kind, state)
    before = toys.bits(toy)
    update = staged(engine, state, toys.changed(state, 9))
    engine.write(update, lambda: None)
    assert toys.bits(toy) != before
    engine.undo(update)
    assert toys.bits(toy) == before


def test_repacked_storage_goes_through_the_loader_and_its_repacking() -> None:
    state = toys.random_state(toys.Fused)

    def repack(toy: toys.Toy) -> None:
        toy.qkv.data.copy_(toy.qkv.data.flip(0).clone())

    def fresh(weights: toys.State) -> toys.Toy:
        toy = loaded(toys.Fused, weights)
        repack(toy)
        return toy

    toy = fresh(state)
    plain = engine_of(toy)
    with pytest.raises(BadInput, match="q, k, v: the engine does not hold what its loader makes"):
        BoundEngine(plain, toys.specs_of(state), canonical(state).__getitem__)
    repacking = Engine(plain.load_weights, plain.tensors, dict, lambda names: repack(toy) if "qkv" in names else None)
    engine = BoundEngine(repacking, toys.specs_of(state), canonical(state).__getitem__)
    assert toys.bits(toy) == toys.bits(fresh(state))
    assert [p.route for p in engine.placement.plans] == [Route.DENSE] * 3 + [Route.PLANNED] * 3
    new = toys.changed(state, 1)
    Applier(engine, NoGate(), limit_s=30).apply([staged(engine, state, new)], lambda: None)
    assert toys.bits(toy) == toys.bits(fresh(new))


def test_an_engine_loaded_from_other_weights_is_not_bound() -> None:
    state = toys.random_state(toys.Fused)
    toy = loaded(toys.Fused, toys.random_state(toys.Fused, seed=5))
    before = toys.bits(toy)
    with pytest.raises(BadInput, match="was it loaded from this run"):
        BoundEngine(engine_of(toy), toys.specs_of(state), canonical(state).__getitem__)
    assert toys.bits(toy) == before


def test_a_foreign_write_is_noticed_before_anything_is_staged() -> None:
    state = toys.random_state(toys.Fused)
    toy, engine = bound(toys.Fused, state)
    toy.norm.data.zero_()
    with pytest.raises(StateMismatch, match="tensor norm: the engine does not hold the bits"):
        staged(engine, state, toys.changed(state, 1, share=1.0))


def test_a_pause_that_takes_too_long_is_undone() -> None:
    state = toys.random_state(toys.Fused)
    toy, engine = bound(toys.Fused, state)
    gate = Recording()
    applier = Applier(engine, gate, limit_s=-1)
    before = toys.bits(toy)
    with pytest.raises(ApplyExpired):
        applier.apply([staged(engine, state, toys.changed(state, 1))], lambda: None)
    assert toys.bits(toy) == before
    assert gate.events == ["close", "reset", "open"]
    applier.check_fit()


def test_an_interrupted_apply_is_undone_and_a_later_one_succeeds() -> None:
    state = toys.random_state(toys.Buffering)
    toy, engine = bound(toys.Buffering, state)
    new = toys.changed(state, 1)
    applier = Applier(engine, Recording(), limit_s=30)
    before = toys.bits(toy)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        applier.apply([staged(engine, state, new)], interrupt)
    assert toys.bits(toy) == before
    applier.apply([staged(engine, state, new)], lambda: None)
    assert toys.bits(toy) == toys.bits(loaded(toys.Buffering, new))


def test_a_replica_that_cannot_be_put_back_stays_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    state = toys.random_state(toys.Fused)
    _, engine = bound(toys.Fused, state)
    gate = Recording()
    applier = Applier(engine, gate, limit_s=30)
    update = staged(engine, state, toys.changed(state, 1))

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(engine, "undo", fail)
    with pytest.raises(ReplicaUnfit, match="no memory"):
        applier.apply([update], fail)
    assert gate.events[-1] != "open"
    with pytest.raises(ReplicaUnfit, match="load its engine anew"):
        applier.apply([], lambda: None)


def test_memory_that_moved_is_refused_before_the_pause() -> None:
    state = toys.random_state(toys.Fused)
    toy, engine = bound(toys.Fused, state)
    gate = Recording()
    update = staged(engine, state, toys.changed(state, 1))
    toy.norm.data = toy.norm.data.clone()
    with pytest.raises(StateMismatch, match="norm: its storage moved"):
        Applier(engine, gate, limit_s=30).apply([update], lambda: None)
    assert gate.events == []


def test_a_buffer_that_no_loader_fills_may_move() -> None:
    state = toys.random_state(toys.Tied)
    toy, engine = bound(toys.Tied, state)
    toy.counter = toy.counter.to(torch.int32)
    new = toys.changed(state, 1)
    Applier(engine, NoGate(), limit_s=30).apply([staged(engine, state, new)], lambda: None)
    assert toys.bits(toy)["embed"] == toys.bits(loaded(toys.Tied, new))["embed"]


def test_one_byte_types_and_nan_payloads_survive_conversion() -> None:
    state = toys.random_state(toys.Converting)
    toy, engine = bound(toys.Converting, state)
    new = {name: t.clone() for name, t in state.items()}
    new["small"].view(torch.int32)[0, 0] = 0x7FC00001
    new["cast"].view(torch.int16)[0, 0] = 0x7F81
    new["narrowed"].view(torch.int32)[0, :3] = torch.tensor([0x7F800001, -0x80000000, 0x7F800000])
    Applier(engine, NoGate(), limit_s=30).apply([staged(engine, state, new)], lambda: None)
    assert toys.bits(toy) == toys.bits(loaded(toys.Converting, new))


def test_the_module_target_says_that_it_is_unbound() -> None:
    target = ModuleTarget(torch.nn.Linear(2, 2))
    assert target.version is None
    with pytest.raises(StateMismatch, match="not bound"):
        _ = target.bound
