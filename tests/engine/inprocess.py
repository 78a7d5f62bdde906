"""One process: engines of several architectures follow a run; after every version all bits are a fresh engine's.

Usage: inprocess.py ARCHITECTURE... Prints one JSON object for each.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import models
import torch
import vllm_env

from dcr_s3 import Receiver, Sender
from dcr_s3.store.memory import MemoryStore
from dcr_s3.targets.storages import module_tensors
from dcr_s3.vllm.local import LocalVllmTarget

VERSIONS = 2


def model_of(llm: Any) -> torch.nn.Module:
    return llm.llm_engine.model_executor.driver_worker.worker.get_model()


def bits(llm: Any) -> dict[str, bytes]:
    return {
        name: t.data.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, t in module_tensors(model_of(llm)).items()
    }


_engines: list[Any] = []


def start(directory: Path) -> Any:
    """A new engine. All stay alive: the first one to go would take the process groups of the others with it."""
    from vllm import LLM

    _engines.append(LLM(model=str(directory), **vllm_env.OPTIONS))
    return _engines[-1]


def follow(name: str, work: Path) -> dict[str, Any]:
    state = models.make_model(name, work / "base")
    store = MemoryStore()
    sender = Sender.open(store, base=state, workers=1)
    llm = start(work / "base")
    target = LocalVllmTarget(llm, verify="full")
    receiver = Receiver(store, work / "mirror", base=work / "base", engine=target, workers=1)
    begun = monotonic()
    receiver.pull()
    result: dict[str, Any] = {"bind_s": monotonic() - begun, "routes": target.bound.placement.counts(), "versions": []}
    reasons = {p.reason for p in target.bound.placement.plans if p.route.value != "planned"}
    result["reasons"] = sorted(reasons)
    addresses = {n: t.data_ptr() for n, t in module_tensors(model_of(llm)).items()}
    for version in range(VERSIONS):
        before = vllm_env.greedy(llm)
        state = models.next_version(state, version, share=0.2)
        sender.publish(state)
        report = receiver.pull()
        fresh = start(models.save_version(state, work / "base", work / f"dense-{version}"))
        mine, theirs = bits(llm), bits(fresh)
        tokens = vllm_env.greedy(llm)
        result["versions"].append(
            {
                "version": report.version,
                "served": target.version,
                "pause_s": target.pause_s,
                "different": [n for n in theirs if mine.get(n) != theirs[n]],
                "same_names": mine.keys() == theirs.keys(),
                "tokens_agree": tokens == vllm_env.greedy(fresh),
                "tokens_moved": tokens != before,
            }
        )
    result["in_place"] = addresses == {n: t.data_ptr() for n, t in module_tensors(model_of(llm)).items()}
    sender.close()
    return result


def main() -> None:
    vllm_env.plain_kernels()
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as work:
            print(json.dumps({"model": name, **follow(name, Path(work))}), flush=True)


if __name__ == "__main__":
    main()
