"""How long an engine pauses for an update, against a dense load of the same engine and vLLM's own sparse patches.

Usage: bench_apply.py [--json] [--size-gb 1.0] [--no-engine]. Runs itself in the serving engine's environment where
there is one (scripts/test installs it); with --no-engine, or without it, plain torch modules stand in. What
staging costs running requests, scripts/bench_serving.py measures.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import save_file

from dcr_s3 import Sender
from dcr_s3.delta import Places, digest_range, tensor_key
from dcr_s3.format.cells import Cells
from dcr_s3.format.dtypes import DTYPES
from dcr_s3.format.run import TensorSpec
from dcr_s3.rank import Rank
from dcr_s3.resident import ResidentReceiver
from dcr_s3.store.memory import MemoryStore
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
REPEATS = 30
DENSE_REPEATS = 8
MANY_ELEMENTS = 100_000_000
"""In 100 and in 10,000 tensors: more than the processor's caches hold."""


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
        values = pool if count <= pool.numel() else pool.repeat(count // pool.numel() + 1)
        state[name] = values[:count].reshape(shape).clone()
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


def touched_lines(changes: Mapping[int, Changed]) -> int:
    """Cache lines that hold a changed cell."""
    return sum(int(np.count_nonzero(np.diff(c.positions // LINE_CELLS))) + 1 for c in changes.values())


def bounds(size_bytes: int, lines: int) -> dict[str, float]:
    """What memory itself takes on this machine for ``lines`` cache lines of ``size_bytes``, in seconds: their share of
    a pass that rewrites everything from front to back; and one write to each of as many lines at random places.
    """
    cells = np.ones(size_bytes // 2, "<u2")
    rng = np.random.default_rng(2)
    chosen = np.flatnonzero(rng.random(cells.size // LINE_CELLS) < lines * LINE_CELLS / cells.size)
    places = Places([cells], chosen * LINE_CELLS)
    values = np.zeros(places.size, "<u2")
    flat = torch.from_numpy(cells.view("<i4"))
    stream_s = best(flat.bitwise_not_) * lines * LINE_CELLS / cells.size
    return {"stream_bound_s": stream_s, "line_bound_s": best(lambda: places.put(values)) * lines / places.size}


class Bench:
    """One module with its state, bound."""

    bound: BoundEngine

    def __init__(self, module: torch.nn.Module, state: State) -> None:
        self.module, self.state = module, state
        self.load = loader_of(module)
        with torch.no_grad():
            self.load(state.items())
        engine, canonical = Engine(self.load, lambda: module_tensors(module)), [cells_of(t) for t in state.values()]
        self.bind_s = best(lambda: self.bind(engine, canonical), 3)
        self.size_bytes = sum(t.nbytes for t in state.values())

    def bind(self, engine: Engine, canonical: list[Cells]) -> None:
        self.bound = BoundEngine(engine, specs_of(self.state), canonical.__getitem__)

    def dense_s(self) -> float:
        """A dense load from tensors in memory."""

        def work() -> None:
            with torch.no_grad():
                self.load(self.state.items())

        return best(work, DENSE_REPEATS)

    def pause(self, changes: Mapping[int, Changed]) -> dict[str, float]:
        """The pause for one update, without and with reading back, and the time to stage it. It is undone each time."""
        begun = perf_counter()
        update = self.bound.stage(changes, [cells_of(t) for t in self.state.values()].__getitem__)
        result = {"stage_s": perf_counter() - begun, "changed": update.changed_elements}
        applier = Applier(self.bound, NoGate(), limit_s=60)
        proofs = {"pause_s": lambda: None, "verified_pause_s": lambda: self.bound.check_written(update)}
        pauses: dict[str, list[float]] = {name: [] for name in proofs}
        for _ in range(REPEATS):
            for name, prove in proofs.items():
                applier.apply([update], prove)
                pauses[name].append(applier.pause_s)
                self.bound.undo(update)
        return result | {name: min(found) for name, found in pauses.items()}

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
        seconds = best(lambda: load_checkpoint_weight_patches(self.module, patches), 1)
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
        made = llama(size_gb * factor) if engine else parts(64, int(size_gb * factor * 1e9 / 128))
        result["sizes"].append(measure_size(Bench(*made), factor, engine and factor == 1))
        del made
        _kept.clear()
        gc.collect()
    result["tensors"] = measure_numbers([parts(count, MANY_ELEMENTS // count) for count in (100, 10_000)])
    result["rank_shares"] = rank_shares()
    result["goals"] = goals(result)
    return result


def measure_size(bench: Bench, factor: int, patches: bool) -> dict[str, Any]:
    """All densities. The larger engine, by ``factor``, gets as many changes as the smaller one."""
    dense_s = bench.dense_s()
    rows = []
    for density in DENSITIES:
        changes = changes_of(bench.state, density / factor)
        lines = touched_lines(changes)
        row = {"density": density / factor, "lines": lines * 64 / bench.size_bytes, **bench.pause(changes)}
        row |= bounds(bench.size_bytes, lines)
        if patches:
            row["patches_s"] = bench.patches_s(changes)
        rows.append(row)
        told = f"{density / factor:.2%} of {bench.size_bytes / 1e9:.2f} GB changed: pause {row['pause_s']:.4f} s"
        print(f"{told}, of a dense load {row['pause_s'] / dense_s:.3f}", file=sys.stderr)
    shown = {"size_bytes": bench.size_bytes, "tensors": len(bench.state), "bind_s": bench.bind_s, "dense_s": dense_s}
    return shown | {"rows": rows}


def measure_numbers(made: list[tuple[torch.nn.Module, State]]) -> list[dict[str, Any]]:
    """The same weights in few and in many tensors, measured in turn."""
    benches = [Bench(*one) for one in made]
    changes = [changes_of(bench.state, 0.01) for bench in benches]
    rows: list[dict[str, Any]] = [
        {"tensors": len(bench.state), "bind_s": bench.bind_s, "dense_s": bench.dense_s()} for bench in benches
    ]
    for _ in range(3):
        for bench, changed, row in zip(benches, changes, rows, strict=True):
            for name, value in bench.pause(changed).items():
                row[name] = min(value, row.get(name, value))
    return rows


class Shard(torch.nn.Module):
    """A layer's weights as one of two tensor-parallel ranks holds them: cut by rows, by columns, or whole."""

    CUTS: ClassVar = {"up": 0, "down": 1, "norm": None}
    SHAPES: ClassVar = {"up": (4096, 1024), "down": (1024, 4096), "norm": (1024,)}

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        for name in self.SHAPES:
            self.register_parameter(name, torch.nn.Parameter(self.cut(name, self.whole(name)), requires_grad=False))

    def whole(self, name: str) -> torch.Tensor:
        return torch.zeros(self.SHAPES[name], dtype=torch.bfloat16)

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dim = self.CUTS[name]
        return (tensor if dim is None else tensor.chunk(2, dim)[self.rank]).clone()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).copy_(self.cut(name, tensor))


class Pair:
    """Two ranks in this process."""

    def __init__(self, shards: list[Shard]) -> None:
        engines = [Engine(s.load_weights, lambda s=s: module_tensors(s)) for s in shards]
        self.ranks = [Rank(engine, index=number) for number, engine in enumerate(engines)]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(rank, method)(*arguments) for rank in self.ranks]

    def serving(self, version: int) -> None:
        """Nobody to tell."""


def rank_shares() -> list[float]:
    """Shares of a version's bytes that two tensor-parallel ranks fetch each."""
    state = random_state(Shard.SHAPES)
    store = MemoryStore()
    with tempfile.TemporaryDirectory() as folder:
        save_file(state, Path(folder) / "model.safetensors")
        with Sender.open(store, base=state, context=False, parts=2, workers=1) as sender:
            shards = [Shard(rank) for rank in range(2)]
            for shard in shards:
                with torch.no_grad():
                    shard.load_weights(state.items())
            receiver = ResidentReceiver(store, Pair(shards), folder)
            receiver.pull()
            for number, changed in changes_of(state, 0.01).items():
                cells_of(list(state.values())[number])[changed.positions] = changed.values
            published = sender.publish(state)
            (report,) = receiver.pull()
    return [wire / published.wire_bytes for wire in report.rank_wire_bytes]


def goals(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What must be reached, each as a ratio and the most that it may be."""
    small, large = result["sizes"]
    rows, many = small["rows"], result["tensors"][1]
    found: list[tuple[str, float, float]] = []
    for row, limit in ((rows[1], 1 / 3), (rows[0], 1 / 15)):
        for name, what in (("pause_s", "pause"), ("verified_pause_s", "pause with reading back")):
            found.append((f"{row['density']:.1%}: {what}, of a dense load", row[name] / small["dense_s"], limit))
        if "patches_s" in row:
            ratio = row["verified_pause_s"] / row["patches_s"]
            found.append((f"{row['density']:.1%}: pause with reading back, of sparse patches", ratio, 1 / 5))
    found.append(("1.0%: pause, of one write to each touched line", rows[1]["pause_s"] / rows[1]["line_bound_s"], 2))
    found.append(("1.0%: pause, of streaming the touched lines", rows[1]["pause_s"] / rows[1]["stream_bound_s"], 2))
    for one, other in zip(rows, large["rows"], strict=True):
        what = f"{one['changed']:,} changes in twice the weights, of the pause, line by line"
        lines = other["lines"] * large["size_bytes"] / (one["lines"] * small["size_bytes"])
        found.append((what, other["verified_pause_s"] / one["verified_pause_s"] / lines, 1.5))
    ratio = many["verified_pause_s"] / result["tensors"][0]["verified_pause_s"]
    found.append((f"{many['changed']:,} changes in 10,000 tensors, of the pause for 100", ratio, 2))
    found.append(("bind 10,000 tensors, seconds", many["bind_s"], 2))
    found.append(("bytes that one of two ranks fetches, of the version's", max(result["rank_shares"]), 0.6))
    return [{"goal": what, "measured": ratio, "limit": limit, "met": ratio <= limit} for what, ratio, limit in found]


def show(result: dict[str, Any]) -> None:
    print(f"{result['engine']}: pause from gate closed to gate open")
    print("weights   changed elements   lines     pause  read back too  dense load  patches  line by line  streamed")
    for size in result["sizes"]:
        dense = f"{1e3 * size['dense_s']:8.0f} ms"
        for row in size["rows"]:
            patches = f"{row['patches_s']:6.2f} s" if "patches_s" in row else " " * 8
            print(
                f"{size['size_bytes'] / 1e9:4.2f} GB {row['changed']:11,} {row['density']:6.2%} {row['lines']:6.1%} "
                f"{1e3 * row['pause_s']:6.1f} ms {1e3 * row['verified_pause_s']:11.1f} ms {dense} "
                f"{patches} {1e3 * row['line_bound_s']:10.1f} ms {1e3 * row['stream_bound_s']:6.1f} ms"
            )
        print(f"    ({size['tensors']} tensors, bound in {size['bind_s']:.2f} s)")
    for row in result["tensors"]:
        pauses = f"pause {1e3 * row['pause_s']:.1f} ms, read back too {1e3 * row['verified_pause_s']:.1f} ms"
        loads = f"dense load {1e3 * row['dense_s']:.0f} ms, bound in {row['bind_s']:.2f} s"
        print(f"{row['tensors']:6,} tensors, {row['changed']:,} changes: {pauses}, {loads}")
    for goal in result["goals"]:
        met = "met" if goal["met"] else "NOT MET"
        print(f"{goal['goal']}: {goal['measured']:.3f} (at most {goal['limit']:.3f}): {met}")


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
