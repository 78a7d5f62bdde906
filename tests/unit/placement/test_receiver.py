"""A receiver that moves a module together with its mirror directory."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dcr_s3 import Receiver, Sender
from dcr_s3.delta import Places
from dcr_s3.errors import ApplyExpired, BadInput, ReplicaUnfit, StateMismatch
from dcr_s3.format.cells import Cells
from dcr_s3.store.memory import MemoryStore
from dcr_s3.targets.engine.apply import NoGate
from dcr_s3.targets.engine.bound import Canonical, Update
from dcr_s3.targets.engine.changes import Changed
from dcr_s3.targets.engine.scatter import HostScatter
from dcr_s3.targets.module import ModuleTarget
from dcr_s3.targets.placement import Block
from dcr_s3.targets.storages import host

sys.path.insert(0, str(Path(__file__).parent))
import toys


def publish_base(kind: type[toys.Toy], store: MemoryStore, directory: Path) -> tuple[toys.State, Sender]:
    state = toys.random_state(kind)
    directory.mkdir()
    save_file(state, directory / "model.safetensors")
    return state, Sender.open(store, base=state, workers=0)


def loaded(kind: type[toys.Toy], state: toys.State) -> toys.Toy:
    toy = kind()
    toy.load_weights(state.items())
    return toy


@pytest.mark.parametrize("kind", [toys.Fused, toys.Converting, toys.Buffering])
@pytest.mark.parametrize("verify", ["off", "written", "full"])
def test_module_and_directory_move_together(
    kind: type[toys.Toy], verify: str, memory_store: MemoryStore, tmp_path: Path
) -> None:
    state, sender = publish_base(kind, memory_store, tmp_path / "dir")
    toy = loaded(kind, state)
    target = ModuleTarget(toy, verify=verify)
    receiver = Receiver(memory_store, tmp_path / "dir", engine=target, workers=0)
    first = receiver.pull().version
    assert target.version == first
    for seed in range(3):
        state = toys.changed(state, seed)
        sender.publish(state)
        assert receiver.pull().version == target.version == sender.position.version
        assert toys.bits(toy) == toys.bits(loaded(kind, state))
    for seed in range(3, 5):
        state = toys.changed(state, seed)
        sender.publish(state)
    receiver.pull()
    assert toys.bits(toy) == toys.bits(loaded(kind, state))
    sender.close()


def test_a_pause_that_takes_too_long_leaves_module_and_directory_where_they_were(
    memory_store: MemoryStore, tmp_path: Path
) -> None:
    state, sender = publish_base(toys.Fused, memory_store, tmp_path / "dir")
    toy = loaded(toys.Fused, state)
    target = ModuleTarget(toy, pause_limit_s=-1)
    receiver = Receiver(memory_store, tmp_path / "dir", engine=target, workers=0)
    before = receiver.pull().version
    new = toys.changed(state, 1)
    sender.publish(new)
    with pytest.raises(ApplyExpired):
        receiver.pull()
    assert target.version == before
    assert toys.bits(toy) == toys.bits(loaded(toys.Fused, state))
    target._opened().limit_s = 30
    assert receiver.pull().version == before + 1
    assert toys.bits(toy) == toys.bits(loaded(toys.Fused, new))
    sender.close()


def test_a_directory_that_moved_alone_is_caught_up_with(memory_store: MemoryStore, tmp_path: Path) -> None:
    state, sender = publish_base(toys.Converting, memory_store, tmp_path / "dir")
    toy = loaded(toys.Converting, state)
    target = ModuleTarget(toy)
    together = Receiver(memory_store, tmp_path / "dir", engine=target, workers=0)
    together.pull()
    state = toys.changed(state, 1)
    sender.publish(state)
    Receiver(memory_store, tmp_path / "dir", workers=0).pull()
    together.pull()
    assert target.version == sender.position.version
    assert toys.bits(toy) == toys.bits(loaded(toys.Converting, state))
    sender.close()


def test_full_proof_catches_what_the_scatter_missed(
    memory_store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, sender = publish_base(toys.Fused, memory_store, tmp_path / "dir")
    toy = loaded(toys.Fused, state)
    target = ModuleTarget(toy, verify="full")
    receiver = Receiver(memory_store, tmp_path / "dir", engine=target, workers=0)
    receiver.pull()
    before = toys.bits(toy)
    whole = target.bound.stage

    def missing_some(changes: dict[int, Changed], canonical: Canonical) -> Update:
        return whole({n: Changed(c.positions[5:], c.values[5:]) for n, c in changes.items()}, canonical)

    sender.publish(toys.changed(state, 1))
    monkeypatch.setattr(target.bound, "stage", missing_some)
    with pytest.raises(StateMismatch, match="the engine does not hold the version's bits"):
        receiver.pull()
    assert toys.bits(toy) == before
    sender.close()


def test_reading_back_catches_a_write_that_did_not_arrive(
    memory_store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, sender = publish_base(toys.Fused, memory_store, tmp_path / "dir")
    toy = loaded(toys.Fused, state)
    target = ModuleTarget(toy)
    receiver = Receiver(memory_store, tmp_path / "dir", engine=target, workers=0)
    receiver.pull()
    before = toys.bits(toy)
    sender.publish(toys.changed(state, 1))
    put = Places.put

    def all_but_the_last(self: Places, values: Cells) -> None:
        kept = self.take()
        put(self, np.append(values[:-1], kept[-1:]))

    monkeypatch.setattr(Places, "put", all_but_the_last)
    with pytest.raises(StateMismatch, match="does not hold what was written to it"):
        receiver.pull()
    assert toys.bits(toy) == before
    sender.close()


def test_a_change_without_a_place_and_a_wrong_place_are_noticed_before_the_pause(
    memory_store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, sender = publish_base(toys.Fused, memory_store, tmp_path / "dir")
    toy = loaded(toys.Fused, state)
    target = ModuleTarget(toy)
    receiver = Receiver(memory_store, tmp_path / "dir", engine=target, workers=0)
    receiver.pull()
    before = toys.bits(toy)
    sender.publish(toys.changed(state, 1))
    places, held = Block.places, Block.held
    with monkeypatch.context() as patched:
        patched.setattr(Block, "places", lambda self, at: places(self, at)[::-1])
        with pytest.raises(StateMismatch, match="the engine does not hold the bits of the version it is at"):
            receiver.pull()
    with monkeypatch.context() as patched:
        patched.setattr(Block, "held", lambda self, at: held(self, at[:-1]))
        with pytest.raises(StateMismatch, match="changes have a place in the engine"):
            receiver.pull()
    assert toys.bits(toy) == before
    receiver.pull()
    sender.close()


def test_a_replica_whose_wrong_writes_cannot_be_undone_is_closed(
    memory_store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, sender = publish_base(toys.Fused, memory_store, tmp_path / "dir")
    target = ModuleTarget(loaded(toys.Fused, state), verify="full")
    receiver = Receiver(memory_store, tmp_path / "dir", engine=target, workers=0)
    receiver.pull()
    whole = target.bound.stage

    def elsewhere(changes: dict[int, Changed], canonical: Canonical) -> Update:
        update = whole(changes, canonical)
        (scatter,) = update.scatters
        assert isinstance(scatter, HostScatter)
        scatter.places = Places([host(s.cells) for s in scatter.storages], np.arange(scatter.size, dtype=np.int64))
        return update

    sender.publish(toys.changed(state, 1, share=0.3))
    monkeypatch.setattr(target.bound, "stage", elsewhere)
    for _ in range(2):
        with pytest.raises(ReplicaUnfit):
            receiver.pull()
    sender.close()


def test_on_demand_proof_names_the_tensor(memory_store: MemoryStore, tmp_path: Path) -> None:
    from dcr_s3.targets.engine.target import EngineMirror

    class Keeping(ModuleTarget):
        mirror: EngineMirror

        def attach(self, mirror: object) -> object:
            self.mirror = super().attach(mirror)
            self.check(self.mirror)
            return self.mirror

    state, sender = publish_base(toys.Fused, memory_store, tmp_path / "dir")
    toy = loaded(toys.Fused, state)
    target = Keeping(toy)
    Receiver(memory_store, tmp_path / "dir", engine=target, workers=0).pull()
    toy.gate_up.data[5, 1] = 3.0
    with pytest.raises(StateMismatch, match="tensor up: the engine does not hold"):
        target.check(target.mirror)
    sender.close()


def test_gate_is_closed_only_for_the_writes(memory_store: MemoryStore, tmp_path: Path) -> None:
    state, sender = publish_base(toys.Fused, memory_store, tmp_path / "dir")
    toy = loaded(toys.Fused, state)

    class Watching(NoGate):
        closed_at: dict[str, bytes]

        def close(self) -> None:
            self.closed_at = toys.bits(toy)

    gate = Watching()
    target = ModuleTarget(toy, gate=gate)
    receiver = Receiver(memory_store, tmp_path / "dir", engine=target, workers=0)
    receiver.pull()
    sender.publish(toys.changed(state, 1))
    receiver.pull()
    assert gate.closed_at == toys.bits(loaded(toys.Fused, state))
    sender.close()


def test_a_module_of_another_shape_is_refused(memory_store: MemoryStore, tmp_path: Path) -> None:
    _, sender = publish_base(toys.Fused, memory_store, tmp_path / "dir")
    module = torch.nn.Linear(3, 3)
    with pytest.raises(BadInput, match="the module has no parameter or buffer of this name"):
        Receiver(memory_store, tmp_path / "dir", engine=ModuleTarget(module), workers=0).pull()
    sender.close()
