"""Plain transformers models follow a run through ``load_state_dict``: tied weights, experts, buffers.

Prints one JSON object for each model.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import models
import torch
import transformers
from safetensors.torch import save_file

from dcr_s3 import Receiver, Sender
from dcr_s3.store.memory import MemoryStore
from dcr_s3.targets.module import ModuleTarget
from dcr_s3.targets.storages import module_tensors


def bits(module: torch.nn.Module) -> dict[str, bytes]:
    tensors = module_tensors(module).items()
    return {n: t.data.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in tensors}


def fresh(name: str, state: models.State) -> torch.nn.Module:
    """A model of the architecture that holds ``state``, given by the module's own names."""
    config = models.CONFIGS[name]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(state, strict=False)
    return model.eval()


def follow(name: str, work: Path) -> dict[str, Any]:
    config = models.CONFIGS[name]()
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    state = {n: t.detach().clone() for n, t in made.state_dict().items() if n not in tied}
    (work / "base").mkdir()
    save_file(state, work / "base" / "model.safetensors")
    store = MemoryStore()
    module = fresh(name, state)
    target = ModuleTarget(module, verify="full")
    receiver = Receiver(store, work / "mirror", base=work / "base", engine=target, workers=1)
    tokens = torch.tensor([[1, 5, 9, 13]])
    with Sender.open(store, base=state, workers=1) as sender:
        receiver.pull()
        result: dict[str, Any] = {"model": name, "routes": target.bound.placement.counts(), "same": []}
        for seed in range(2):
            state = models.next_version(state, seed)
            sender.publish(state)
            receiver.pull()
            other = fresh(name, state)
            same_bits = bits(module) == bits(other)
            with torch.no_grad():
                same_answer = torch.equal(module(tokens).logits, other(tokens).logits)
            result["same"].append([same_bits, same_answer, target.version == sender.position.version])
    return result


def main() -> None:
    for name in ("llama", "qwen2", "qwen3_moe"):
        with tempfile.TemporaryDirectory() as work:
            print(json.dumps(follow(name, Path(work))), flush=True)


if __name__ == "__main__":
    main()
