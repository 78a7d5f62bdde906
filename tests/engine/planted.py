"""One real engine in this process without a mirror, in which something is planted; each time what came of it is told.

Prints one JSON object: by plant, the error's kind and text, whether all bits are as they should be, what the gate saw.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))
import models
import torch
import vllm_env
from inprocess import bits, model_of, start

from dcr_s3 import Sender
from dcr_s3.rank import Rank
from dcr_s3.ranks import LocalRank
from dcr_s3.resident import ResidentReceiver
from dcr_s3.store.memory import MemoryStore
from dcr_s3.targets.engine.apply import NoGate
from dcr_s3.targets.engine.bound import BoundEngine
from dcr_s3.vllm.model import model_engine

QKV = "model.layers.0.self_attn.qkv_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
OTHER_DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.norm.weight"


class Gate(NoGate):
    """Notes what happens to it."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def close(self) -> None:
        self.events.append("close")

    def open(self) -> None:
        self.events.append("open")


class Trial:
    """An engine that follows a run, and always one more version to pull."""

    def __init__(self, work: Path) -> None:
        self.state = models.make_model("llama", work / "base")
        self.store = MemoryStore()
        self.sender = Sender.open(self.store, base=self.state, workers=1)
        self.llm = start(work / "base")
        self.parameters = dict(model_of(self.llm).named_parameters())
        self.ranks = LocalRank(Rank(model_engine(model_of(self.llm))))
        self.base = str(work / "base")
        self.gate = Gate()
        self.receiver = self.new_receiver()
        self.receiver.pull()
        self.results: dict[str, Any] = {}
        self._versions = 0

    def new_receiver(self) -> ResidentReceiver:
        return ResidentReceiver(self.store, self.ranks, self.base, gate=self.gate)

    def publish(self) -> None:
        self._versions += 1
        self.state = models.next_version(self.state, self._versions, share=0.2)
        self.sender.publish(self.state)

    def note(self, name: str, *actions: Callable[[], object]) -> None:
        """Does each, and notes what it raised; then whether the engine has the bits it had before."""
        before, self.gate.events = bits(self.llm), []
        raised = []
        for action in actions:
            try:
                action()
                raised.append(["", ""])
            except Exception as error:
                raised.append([type(error).__name__, str(error)])
        self.results[name] = {
            "raised": raised,
            "as_before": bits(self.llm) == before,
            "gate": list(self.gate.events),
        }

    @contextmanager
    def data(self, name: str, data: torch.Tensor) -> Iterator[None]:
        """Inside, a parameter lies elsewhere."""
        parameter = self.parameters[name]
        before, parameter.data = parameter.data, data
        try:
            yield
        finally:
            parameter.data = before

    def plant_in_weights(self) -> None:
        """Memory that something else moved or wrote to."""
        self.publish()
        pull, verify = self.receiver.pull, self.receiver.verify
        with self.data(OTHER_DOWN, self.parameters[DOWN].data):
            self.note("alias", pull, verify)
        with self.data(NORM, self.parameters[NORM].data.clone()):
            self.note("moved", pull, verify)
        qkv = self.parameters[QKV].data
        before = qkv.clone()
        qkv.copy_(before.flip(0))
        self.note("repacked", pull, verify)
        qkv.copy_(before)
        norm = self.parameters[NORM].data
        stale = norm.clone()
        pull()
        new = norm.clone()
        norm.copy_(stale)
        self.note("stale", verify)
        norm.copy_(new)
        verify()

    def plant_in_writes(self) -> None:
        """Writes that do not get everywhere, or do not come to their end."""
        self.publish()
        whole, norm = BoundEngine.write, self.parameters[NORM].data

        def missing(bound: BoundEngine, update: Any, check: Callable[[], None]) -> None:
            before = norm.clone()
            whole(bound, update, check)
            norm.copy_(before)

        def breaking(bound: BoundEngine, update: Any, check: Callable[[], None]) -> None:
            whole(bound, update, check)
            raise RuntimeError("planted")

        rank = self.ranks.rank
        with patch.object(BoundEngine, "write", missing):
            self.note("missed", self.receiver.pull, self.receiver.verify)
        with patch.object(BoundEngine, "write", breaking):
            self.note("interrupted", self.receiver.pull, self.receiver.verify)
        rank._applied().limit_s = -1
        self.note("expired", self.receiver.pull, self.receiver.verify)
        rank._applied().limit_s = 30
        self.receiver.pull()

    def compare(self, work: Path) -> None:
        """The engine against a fresh one."""
        fresh = start(models.save_version(self.state, work / "base", work / "dense"))
        self.results["equals_fresh"] = bits(self.llm) == bits(fresh)
        self.results["tokens_agree"] = vllm_env.greedy(self.llm) == vllm_env.greedy(fresh)

    def plant_in_undoing(self) -> None:
        """A write that ends half done, and cannot be undone."""
        self.publish()

        def fail(*_: object) -> None:
            raise RuntimeError("planted")

        with patch.object(BoundEngine, "check_written", fail), patch.object(BoundEngine, "undo", fail):
            self.note("unfit", self.receiver.pull)
        self.note("closed", self.receiver.pull, self.new_receiver().pull)


def main() -> None:
    vllm_env.plain_kernels()
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder))
        trial.plant_in_weights()
        trial.plant_in_writes()
        trial.compare(Path(folder))
        trial.plant_in_undoing()
        trial.sender.close()
    print(json.dumps(trial.results), flush=True)


if __name__ == "__main__":
    main()
