"""One process: engines with weights laid out in other ways (quantised; experts in one tensor; latent attention) follow
a run, or are refused by name.

Usage: layouts.py CHECKPOINT... Prints one JSON object for each.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import models
import torch
import vllm_env
from inprocess import bits, start
from safetensors.torch import save_file

from dcr_s3 import Receiver, Sender
from dcr_s3.errors import BadInput
from dcr_s3.store.memory import MemoryStore
from dcr_s3.vllm.local import LocalVllmTarget

State = models.State
BLOCK = 128
SIZES = {"intermediate_size": 256, "num_key_value_heads": 4}


def linear(state: State) -> list[str]:
    return [n for n, t in state.items() if t.dim() == 2 and ".layers." in n]


def int8_channels(state: State) -> tuple[State, dict[str, Any]]:
    """compressed-tensors: int8 weights, one scale a row, activations quantised as they come."""
    result = dict(state)
    for name in linear(state):
        scale = state[name].float().abs().amax(1, keepdim=True) / 100
        result[name] = (state[name].float() / scale).round().to(torch.int8)
        result[f"{name}_scale"] = scale.to(torch.float32)
    return result, compressed("int-quantized", "int")


def fp8_channels(state: State) -> tuple[State, dict[str, Any]]:
    """compressed-tensors: fp8 weights, one scale a row, activations quantised as they come."""
    result = dict(state)
    for name in linear(state):
        scale = state[name].float().abs().amax(1, keepdim=True) / 100
        result[name] = (state[name].float() / scale).to(torch.float8_e4m3fn)
        result[f"{name}_scale"] = scale.to(torch.float32)
    return result, compressed("float-quantized", "float")


def compressed(layout: str, kind: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel", "dynamic": False}
    activations = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    groups = {"group_0": group}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": ["lm_head"]}


def fp8_tensors(state: State) -> tuple[State, dict[str, Any]]:
    """fp8 weights, one scale a tensor."""
    result = dict(state)
    for name in linear(state):
        scale = state[name].float().abs().max() / 100
        result[name] = (state[name].float() / scale).to(torch.float8_e4m3fn)
        result[f"{name}_scale"] = scale.to(torch.float32)
    return result, {"quant_method": "fp8", "activation_scheme": "dynamic"}


def fp8_blocks(state: State) -> tuple[State, dict[str, Any]]:
    """fp8 weights, one scale a block of 128 x 128."""
    result = dict(state)
    for name in linear(state):
        rows, columns = state[name].shape
        tiles = state[name].float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scale = tiles.abs().amax((1, 3)) / 100
        result[name] = (tiles / scale[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
        result[f"{name}_scale_inv"] = scale
    return result, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


SCHEMES: dict[str, Callable[[State], tuple[State, dict[str, Any]]]] = {
    "int8_channels": int8_channels,
    "fp8_channels": fp8_channels,
    "fp8_tensors": fp8_tensors,
    "fp8_blocks": fp8_blocks,
}


def make(name: str, directory: Path) -> State:
    """Saves a checkpoint: quantised, or of the architecture of this name."""
    if name not in SCHEMES:
        return models.make_model(name, directory)
    models.make_model("llama", directory, **SIZES)
    state, quantisation = SCHEMES[name](models.load_directory(directory))
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
    return state


def changed(state: State, seed: int) -> State:
    """Some bits of every tensor flipped, none that makes a number much larger."""
    rng = torch.Generator().manual_seed(seed)
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    result = {}
    for name, tensor in state.items():
        cells = tensor.clone().view(views[tensor.element_size()])
        mask = torch.rand(tensor.shape, generator=rng) < 0.2
        mask.view(-1)[0] = True
        flips = torch.randint(1, 4, tensor.shape, generator=rng).to(cells.dtype) << (tensor.element_size() == 4) * 16
        result[name] = torch.where(mask, cells ^ flips, cells).view(tensor.dtype)
    return result


def follow(name: str, work: Path) -> dict[str, Any]:
    state = make(name, work / "base")
    store = MemoryStore()
    sender = Sender.open(store, base=state, workers=1)
    llm = start(work / "base")
    target = LocalVllmTarget(llm, verify="full")
    receiver = Receiver(store, work / "mirror", base=work / "base", engine=target, workers=1)
    before = bits(llm)
    try:
        receiver.pull()
    except BadInput as error:
        return {"refused": str(error), "untouched": bits(llm) == before}
    plans = target.bound.placement.plans
    result: dict[str, Any] = {
        "routes": target.bound.placement.counts(),
        "reasons": sorted({p.reason for p in plans}),
        "versions": [],
    }
    for seed in range(2):
        tokens = vllm_env.greedy(llm)
        state = changed(state, seed)
        sender.publish(state)
        receiver.pull()
        fresh = start(models.save_version(state, work / "base", work / f"dense-{seed}"))
        mine, theirs = bits(llm), bits(fresh)
        result["versions"].append(
            {
                "different": [n for n in theirs if mine.get(n) != theirs[n]],
                "tokens_agree": vllm_env.greedy(llm) == vllm_env.greedy(fresh),
                "tokens_moved": vllm_env.greedy(llm) != tokens,
            }
        )
    sender.close()
    return result


def main() -> None:
    vllm_env.plain_kernels()
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as work:
            print(json.dumps({"checkpoint": name, **follow(name, Path(work))}), flush=True)


if __name__ == "__main__":
    main()
