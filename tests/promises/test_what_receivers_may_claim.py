"""A version counts where it is proved, and what it takes to get there is bounded."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from dcr_s3 import Receiver, Sender
from dcr_s3.errors import CorruptObject, StoreUnavailable
from dcr_s3.format.ack import Ack
from dcr_s3.format.keys import ack_key
from dcr_s3.sending.blocks import BlockBuilder
from dcr_s3.store.memory import MemoryStore
from dcr_s3.targets.state import read_state
from dcr_s3.testing.chaos_model import ChaosModel

Trial = Any
BLOCK_BYTES = 1 << 16


def acknowledged(trial: Trial) -> int:
    body = trial.store.get(ack_key("one"), limit_bytes=10_000).body
    return Ack.from_bytes(body, where="").version


def test_a_pull_that_fails_neither_moves_the_version_nor_acknowledges_it(trial: Trial) -> None:
    with trial.sender(fence=False) as sender:
        trial.publish(sender)
        trial.receiver("one").pull()
        trial.publish(sender)
    read = trial.store.read_into

    def failing(key: str, start: int, buffer: memoryview) -> None:
        raise StoreUnavailable("503 SlowDown")

    def flipping(key: str, start: int, buffer: memoryview) -> None:
        read(key, start, buffer)
        buffer[len(buffer) // 2] ^= 1

    for trouble, error in ((failing, StoreUnavailable), (flipping, CorruptObject)):
        trial.store.read_into = trouble
        with pytest.raises(error):
            trial.receiver("one").pull()
        assert (read_state(trial.root / "one").position.version, acknowledged(trial)) == (1, 1)
        trial.assert_holds(1)
    trial.store.read_into = read
    trial.receiver("one").pull()
    assert (read_state(trial.root / "one").position.version, acknowledged(trial)) == (2, 2)
    trial.assert_holds(2)


def test_weights_and_their_scales_arrive_together_or_not_at_all(trial: Trial) -> None:
    with trial.sender(fence=False) as sender:
        state = dict(trial.states[-1])
        for name in ("layer.1.w8", "layer.1.scale"):
            state[name] = replace(state[name], cells=state[name].cells ^ 1)
        trial.publish(sender, state)
    seen: list[int] = []
    read = trial.store.read_into

    def counting(key: str, start: int, buffer: memoryview) -> None:
        seen.append(len(seen))
        if len(seen) == 1:
            raise StoreUnavailable("503 SlowDown")
        read(key, start, buffer)

    trial.store.read_into = counting
    with pytest.raises(StoreUnavailable):
        trial.receiver("one").pull()
    trial.assert_holds(0)
    trial.receiver("one").pull()
    trial.assert_holds(1)


def test_memory_for_staging_does_not_grow_with_the_model(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcr_s3.sending.version.BLOCK_DENSE_BYTES", BLOCK_BYTES)
    monkeypatch.setattr("dcr_s3.sending.version.BlockBuilder", partial(BlockBuilder, BLOCK_BYTES))
    monkeypatch.setattr("dcr_s3.targets.mirror.BLOCK_DENSE_BYTES", BLOCK_BYTES)
    small, large = (peaks_of_a_refit(tmp_path / str(size), size) for size in (2 << 20, 16 << 20))
    assert np.all(np.subtract(large, small) < 4 << 20)


def peaks_of_a_refit(root: Any, size_bytes: int) -> tuple[int, int]:
    """Most bytes allocated at once while one version is published, and while it is pulled."""
    model, store = ChaosModel(root / "model", 1, size_bytes), MemoryStore()
    receiver = Receiver(store, root / "mirror", base=model.directory(0), name="one", workers=0)
    with Sender.open(store, base=model.directory(0), state_dir=root / "state", workers=0) as sender:
        receiver.pull()
        model.step()
        peaks = []
        for action in (lambda: sender.publish(model.directory(1)), receiver.pull):
            tracemalloc.start()
            action()
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert model.holds(1, root / "mirror")
    return peaks[0], peaks[1]
