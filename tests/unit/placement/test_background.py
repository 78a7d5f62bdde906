"""Staging lets requests go first; while the engine is paused there is nobody to let go first."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from dcr_s3 import rank as ranks
from dcr_s3.ranks import LocalRank
from dcr_s3.resident import ResidentReceiver
from dcr_s3.store.memory import MemoryStore

sys.path.insert(0, str(Path(__file__).parent))
import toys
from groups import engine_of, loaded, published


@pytest.mark.parametrize(("mode", "times"), [("asynchronous", 1), ("synchronous", 0)])
def test_staging_steps_back_only_while_requests_run(
    mode: Any, times: int, memory_store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, sender = published(toys.Fused, memory_store, tmp_path / "base", context=False)
    channel = LocalRank(engine_of(loaded(toys.Fused(), state)))
    receiver = ResidentReceiver(memory_store, channel, str(tmp_path / "base"), mode=mode)
    receiver.pull()
    stepped: list[None] = []
    monkeypatch.setattr(ranks, "step_back", lambda: stepped.append(None))
    sender.publish(toys.changed(state, 1))
    receiver.pull()
    assert len(stepped) == times
    sender.close()
