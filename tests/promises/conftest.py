"""A run on a memory store, played through in the calling thread: every version's bits are kept to compare with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dcr_s3 import PublishReport, Receiver, Sender
from dcr_s3.store.memory import MemoryBucket, MemoryStore
from dcr_s3.testing.checkpoints import State, changed, differing, load, make_state, save


class Trial:
    """``states[v]`` are the bits of version ``v``; fences repeat the one before."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bucket = MemoryBucket()
        self.store = MemoryStore(self.bucket)
        self.states: list[State] = [make_state(0)]
        save(self.states[0], root / "base", shards=2)

    def sender(self, **options: Any) -> Sender:
        """Opens the run, making it first if there is none; a fence counts as a version."""
        settings = {"base": self.root / "base", "state_dir": self.root / "state", "workers": 0, **options}
        sender = Sender.open(self.store, **settings)
        while len(self.states) <= sender.position.version:
            self.states.append(self.states[-1])
        return sender

    def publish(self, sender: Sender, state: State | None = None, *, fraction: float = 0.05) -> PublishReport:
        """Publishes ``state``, by default the newest with some cells changed."""
        new = changed(self.states[-1], len(self.states), fraction) if state is None else state
        report = sender.publish(save(new, self.root / "trained", shards=2))
        self.states.append(new)
        return report

    def run(self, versions: int, **options: Any) -> None:
        """Opens a sender without a fence and publishes some versions."""
        with self.sender(fence=False, **options) as sender:
            for _ in range(versions):
                self.publish(sender)

    def receiver(self, name: str = "one", **options: Any) -> Receiver:
        """A receiver whose directory has its name."""
        settings = {"base": self.root / "base", "name": name, "workers": 0, **options}
        return Receiver(self.store, self.root / name, **settings)

    def held(self, name: str = "one") -> State:
        """What a receiver's directory holds."""
        return load(self.root / name)

    def assert_holds(self, version: int, name: str = "one") -> None:
        """Its bits are exactly those of the version."""
        assert differing(self.held(name), self.states[version]) == []

    def listed(self, prefix: str = "") -> list[str]:
        return [info.key for info in self.store.list(prefix)]

    def age(self, seconds: float, prefix: str = "") -> None:
        """Makes objects older by the store's clock."""
        for key, stored in self.bucket.objects.items():
            if key.startswith(prefix):
                self.bucket.objects[key] = replace(stored, modified_at=stored.modified_at - seconds)


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)
