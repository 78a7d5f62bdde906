"""How long an engine pauses for an update, against a dense load of the same engine and vLLM's own sparse patches.

Usage: bench_apply.py [--json] [--size-gb 1.0] [--no-engine]. Runs itself in the serving engine's environment where
there is one (scripts/test installs it); with --no-engine, or without it, plain torch modules stand in.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from dcr_s3.delta import digest_range, tensor_key
from dcr_s3.format.cells import Cells
from dcr_s3.format.dtypes import DTYPES
from dcr_s3.format.run import TensorSpec
from dcr_s3.targets.engine.apply import Applier, NoGate
from dcr_s3.targets.engine.bound import BoundEngine, Engine
from dcr_s3.targets.engine.changes import Changed
from dcr_s3.targets.module import loader_of
from dcr_s3.targets.storages import module_tensors

ROOT = Path(__file__).resolve().parent.parent
ENGINE_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"

State = dict[str, torch.Tensor]
DENSITIES = (0.001, 0.01, 0.05)
LINE_CELLS = 32
"""bf16 cells in a cache line of 64 bytes."""
REPEATS = 4


def cells_of(tensor: torch.Tensor) -> Cells:
    return tensor.reshape(-1).view(torch.int16).numpy().view("<u2")


def specs_of(state: State) -> list[TensorSpec]:
    empty = digest_range(tensor_key("", DTYPES["BF16"], ()), 0, np.empty(0, "<u2")).hex()
    return [TensorSpec(name=n, dtype="BF16", shape=tuple(t.shape), digest=empty) for n, t in state.items()]


def random_state(shapes: Mapping[str, tuple[int, ...]]) -> State:
    """Random bf16 values."""
    rng = np.random.default_rng(0)
    pool = torch.from_numpy(rng.standard_normal(1 << 22, np.float32)).to(torch.bfloat16)
    state = {}
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        state[name] = pool.repeat(count // pool.numel() + 1)[:count].reshape(shape).clone()
    return state


def changes_of(state: State, density: float) -> dict[int, Changed]:
    """Changes of the lowest bit in every tensor, at random distances that give this density."""
    rng = np.random.default_rng(1)
    result = {}
    for number, tensor in enumerate(state.values()):
        steps = rng.geometric(density, max(1, round(tensor.numel() * density * 1.1)))
        positions = np.cumsum(steps) - 1
        positions = positions[: np.searchsorted(positions, tensor.numel())]
        result[number] = Changed(positions, cells_of(tensor)[positions] ^ np.uint16(1))
    return result


def best(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """The shortest of several runs, seconds."""
    seconds = []
    for _ in range(repeats):
        begun = perf_counter()
        work()
        seconds.append(perf_counter() - begun)
    return min(seconds)


class Bench:
    """One module with its state, bound."""

    def __init__(self, module: torch.nn.Module, state: State) -> None:
        self.module, self.state = module, state
        self.load = loader_of(module)
        with torch.no_grad():
            self.load(state.items())
        begun = perf_counter()
        engine = Engine(self.load, lambda: module_tensors(module))
        self.bound = BoundEngine(engine, specs_of(state), [cells_of(t) for t in state.values()].__getitem__)
        self.bind_s = perf_counter() - begun
        self.size_bytes = sum(t.nbytes for t in state.values())

    def dense_s(self) -> float:
        """A dense load from tensors in memory."""

        def work() -> None:
            with torch.no_grad():
                self.load(self.state.items())

        return best(work)

    def pause(self, changes: Mapping[int, Changed]) -> dict[str, float]:
        """The pause for one update, without and with reading back, and the time to stage it. It is undone each time."""
        begun = perf_counter()
        update = self.bound.stage(changes, [cells_of(t) for t in self.state.values()].__getitem__)
        result = {"stage_s": perf_counter() - begun, "changed": update.changed_elements}
        applier = Applier(self.bound, NoGate(), limit_s=60)
        for name, prove in (("pause_s", lambda: None), ("verified_pause_s", lambda: self.bound.check_written(update))):
            pauses = []
            for _ in range(REPEATS):
                applier.apply([update], prove)
                pauses.append(applier.pause_s)
                self.bound.undo(update)
            result[name] = min(pauses)
        return result

    def patches_s(self, changes: Mapping[int, Changed]) -> float:
        """vLLM's own sparse patch loader, with the same changes."""
        from vllm.model_executor.model_loader.checkpoint_weight_patch import (
            CheckpointWeightPatch,
            load_checkpoint_weight_patches,
        )

        patches = []
        for number, (name, tensor) in enumerate(self.state.items()):
            places = torch.from_numpy(changes[number].positions)
            values = torch.from_numpy(changes[number].values.view("<i2")).view(torch.bfloat16)
            patches.append(CheckpointWeightPatch(name, tuple(tensor.shape), tensor.dtype, values, places))
        seconds = best(lambda: load_checkpoint_weight_patches(self.module, patches), 2)
        with torch.no_grad():
            self.load(self.state.items())
        return seconds


def llama(size_gb: float) -> tuple[torch.nn.Module, State]:
    """vLLM's llama with about ``size_gb`` of weights, in this process."""
    sys.path.insert(0, str(ROOT / "tests" / "engine"))
    import models
    import vllm_env

    vllm_env.plain_kernels()
    import transformers
    from vllm import LLM

    layers = max(1, round((size_gb * 1e9 / 2 - 2 * 32000 * 2048) / 46.2e6))
    sizes = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": layers}
    config = transformers.LlamaConfig(
        **{**models.SIZES, **sizes, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    folder = tempfile.mkdtemp(prefix="dcr-bench-")
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {n: tuple(t.shape) for n, t in transformers.LlamaForCausalLM(config).state_dict().items()}
    made = LLM(model=folder, load_format="dummy", **vllm_env.OPTIONS)
    _kept.append(made)
    return made.llm_engine.model_executor.driver_worker.worker.get_model(), random_state(shapes)


_kept: list[Any] = []


class Parts(torch.nn.Module):
    """Many equal parameters."""

    def __init__(self, count: int, elements: int) -> None:
        super().__init__()
        for number in range(count):
            weight = torch.zeros(elements, dtype=torch.bfloat16)
            self.register_parameter(f"p{number}", torch.nn.Parameter(weight, requires_grad=False))


def parts(count: int, elements: int) -> tuple[torch.nn.Module, State]:
    module = Parts(count, elements)
    return module, random_state({name: (elements,) for name, _ in module.named_parameters()})


def measure(size_gb: float, engine: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"engine": "vllm llama" if engine else "plain module", "sizes": [], "tensors": []}
    for factor in (1, 2):
        bench = Bench(*(llama(size_gb * factor) if engine else parts(64, int(size_gb * factor * 1e9 / 128))))
        dense_s = bench.dense_s()
        rows = []
        for density in DENSITIES:
            # The larger engine gets as many changes as the smaller one.
            share = density / factor
            changes = changes_of(bench.state, share)
            row = {"density": share, "lines": 1 - (1 - share) ** LINE_CELLS, **bench.pause(changes)}
            row["of_dense"] = row["pause_s"] / dense_s
            if engine and factor == 1:
                row["patches_s"] = bench.patches_s(changes)
                row["of_patches"] = row["pause_s"] / row["patches_s"]
            rows.append(row)
            told = f"{share:.2%} of {bench.size_bytes / 1e9:.2f} GB changed: pause {row['pause_s']:.4f} s"
            print(f"{told}, {row['of_dense']:.3f} of a dense load", file=sys.stderr)
        tensors = len(bench.state)
        shown = {"size_bytes": bench.size_bytes, "tensors": tensors, "bind_s": bench.bind_s, "dense_s": dense_s}
        result["sizes"].append({**shown, "rows": rows})
        del bench
        _kept[:-1] = []
        gc.collect()
    for count in (100, 10_000):
        bench = Bench(*parts(count, 20_000_000 // count))
        shown = {"tensors": count, "bind_s": bench.bind_s, "dense_s": bench.dense_s()}
        result["tensors"].append({**shown, **bench.pause(changes_of(bench.state, 0.01))})
    return result


def show(result: dict[str, Any]) -> None:
    print(f"{result['engine']}: pause from gate closed to gate open")
    print("| weights | changed | cache lines touched | pause | verified | of a dense load | of sparse patches |")
    print("|---|---|---|---|---|---|---|")
    for size in result["sizes"]:
        for row in size["rows"]:
            patches = f"1/{1 / row['of_patches']:.0f}" if "of_patches" in row else ""
            print(
                f"| {size['size_bytes'] / 1e9:.2f} GB | {row['changed']:,} | {row['lines']:.1%} | "
                f"{1e3 * row['pause_s']:.1f} ms | {1e3 * row['verified_pause_s']:.1f} ms | {row['of_dense']:.3f} | "
                f"{patches} |"
            )
        dense, bound = f"dense load {1e3 * size['dense_s']:.0f} ms", f"bind {size['bind_s']:.2f} s"
        print(f"({dense}, {bound}, {size['tensors']} tensors)")
    for row in result["tensors"]:
        print(
            f"{row['tensors']:,} tensors of {20_000_000 // row['tensors']:,} elements, 1 % changed: pause "
            f"{1e3 * row['pause_s']:.1f} ms, dense load {1e3 * row['dense_s']:.1f} ms, bind {row['bind_s']:.2f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--size-gb", type=float, default=1.0)
    parser.add_argument("--no-engine", action="store_true")
    options = parser.parse_args()
    engine = ENGINE_PYTHON.exists() and not options.no_engine
    if engine and Path(sys.prefix).resolve() != ENGINE_PYTHON.parent.parent.resolve():
        os.execv(ENGINE_PYTHON, [str(ENGINE_PYTHON), *sys.argv])
    result = measure(options.size_gb, engine)
    if options.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
