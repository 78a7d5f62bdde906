"""Any order of publishing, restarting, folding, snapshots, retention and pulling: every mirror is one version, bit for
bit, moves only forward, and converges.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dcr_s3 import Receiver, Sender
from dcr_s3.errors import ChainBroken
from dcr_s3.format.keys import snapshot_version
from dcr_s3.retention import gc
from dcr_s3.store.memory import MemoryBucket, MemoryStore
from dcr_s3.testing.checkpoints import SHAPES, State, changed, differing, load, make_state, save
from dcr_s3.upkeep import make_fold, make_snapshot

SHAPES_HERE = {name: SHAPES[name] for name in ("embed", "layer.0.norm", "layer.1.w8", "steps", "empty")}
NAMES = st.sampled_from(["one", "two", "three"])
DAY = 86_400.0


class Lifecycle(RuleBasedStateMachine):
    """``states[v]`` are the bits of version ``v``."""

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="dcr-lifecycle-"))
        self.bucket = MemoryBucket()
        self.store = MemoryStore(self.bucket)
        self.states: list[State] = [make_state(0, SHAPES_HERE)]
        save(self.states[0], self.root / "base")
        self.held: dict[str, int] = {}
        self.seed = 0
        self.sender = self.open("here")

    def open(self, machine: str, *, fence: bool = True) -> Sender:
        base = self.root / "base"
        sender = Sender.open(self.store, base=base, state_dir=self.root / machine, fence=fence, workers=0)
        while len(self.states) <= sender.position.version:
            self.states.append(self.states[-1])
        return sender

    @rule(fraction=st.sampled_from([0.0, 0.02, 0.3]), back=st.booleans())
    def publish(self, fraction: float, back: bool) -> None:
        self.seed += 1
        source = self.states[max(0, len(self.states) - 3)] if back else self.states[-1]
        self.states.append(changed(source, self.seed, fraction))
        report = self.sender.publish(save(self.states[-1], self.root / "new"))
        assert report.version == len(self.states) - 1

    @rule(machine=st.sampled_from(["here", "there"]), fence=st.booleans())
    def restart(self, machine: str, fence: bool) -> None:
        self.sender.close()
        self.sender = self.open(machine, fence=fence)
        assert self.sender.position.version == len(self.states) - 1

    @rule(name=NAMES, back=st.integers(0, 3), lease_s=st.sampled_from([60, 30 * 86_400]))
    def pull(self, name: str, back: int, lease_s: int) -> None:
        wanted = max(len(self.states) - 1 - back, self.held.get(name, 0))
        receiver = Receiver(self.store, self.root / name, base=self.base(name), name=name, lease_s=lease_s, workers=0)
        try:
            version = receiver.pull(to_version=wanted).version
        except ChainBroken:
            # Versions between snapshots may be gone for good; the newest never is.
            assert wanted < len(self.states) - 1
            version = receiver.pull().version
        assert version >= self.held.get(name, 0)
        self.held[name] = version

    @precondition(lambda self: self.held)
    @rule(data=st.data(), fold=st.booleans())
    def upkeep(self, data: st.DataObject, fold: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        if fold:
            try:
                self.held[name] = make_fold(self.store, self.root / name, workers=0).last
            except ChainBroken:
                self.pull(name, 0, 60)
        else:
            make_snapshot(self.store, self.root / name, workers=0)

    @rule(days=st.sampled_from([0.001, 2.0]), keep_versions=st.integers(1, 3))
    def collect(self, days: float, keep_versions: int) -> None:
        for key, stored in self.bucket.objects.items():
            self.bucket.objects[key] = replace(stored, modified_at=stored.modified_at - days * DAY)
        self.publish(0.01, False)
        gc(self.store, keep_versions=keep_versions, dry_run=False, workers=0)

    @invariant()
    def every_mirror_is_one_version(self) -> None:
        for name, version in getattr(self, "held", {}).items():
            assert differing(load(self.root / name), self.states[version]) == [], (name, version)

    def base(self, name: str) -> Path | None:
        """Who comes with nothing uses a snapshot where there is one: then the chain from version 0 may be gone."""
        snapshots = [k for k in self.bucket.objects if snapshot_version(k) is not None]
        return None if snapshots and name not in self.held else self.root / "base"

    def teardown(self) -> None:
        if not hasattr(self, "sender"):
            return
        with closing(self.sender):
            for name in [*self.held, "new"]:
                receiver = Receiver(self.store, self.root / name, base=self.base(name), name=name, workers=0)
                assert receiver.pull().version == len(self.states) - 1
                assert differing(load(self.root / name), self.states[-1]) == []
        shutil.rmtree(self.root)


TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)
