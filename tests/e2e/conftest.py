"""Made-up checkpoints of many types in several files, and the command line called as a person would."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dcr_s3.cli.app import run

SHARDS = {
    "model-00001-of-00003.safetensors": {
        "model.embed_tokens.weight": ((300, 64), torch.bfloat16),
        "model.layers.0.mlp.up_proj.weight": ((257, 64), torch.bfloat16),
        "model.layers.0.mlp.up_proj.weight_scale": ((257, 1), torch.float32),
    },
    "model-00002-of-00003.safetensors": {
        "model.layers.0.mlp.down_proj.weight": ((64, 257), torch.float8_e4m3fn),
        "model.layers.0.router.bias": ((7,), torch.float64),
        "model.layers.0.router.counts": ((7,), torch.int64),
    },
    "model-00003-of-00003.safetensors": {
        "model.norm.weight": ((64,), torch.float16),
        "model.mask": ((3, 5), torch.bool),
        "model.empty": ((0, 4), torch.bfloat16),
    },
}
SIZES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Outcome:
    """What one command line gave. ``data`` is the JSON object on stdout, None without --json."""

    data: Any
    out: str
    err: str


Cli = Callable[..., Outcome]
MakeCheckpoint = Callable[..., Path]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cli]:
    """Calls ``dcr-s3`` in this process, with the sender's baselines below ``tmp_path``. ``code`` must be returned."""
    monkeypatch.setenv("DCR_STATE_DIR", str(tmp_path / "state"))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def call(*arguments: object, code: int = 0) -> Outcome:
        capsys.readouterr()
        returned = run([str(a) for a in arguments])
        captured = capsys.readouterr()
        assert returned == code, captured.err
        data = None
        if "--json" in arguments:
            assert captured.out.count("\n") == 1, captured.out
            data = json.loads(captured.out)
        return Outcome(data, captured.out, captured.err)

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> MakeCheckpoint:
    """``make_checkpoint(version)``: a directory that differs from the version before in some cells of some tensors."""

    def make(version: int, name: str | None = None) -> Path:
        directory = tmp_path / (name or f"version-{version}")
        directory.mkdir()
        weight_map = {}
        for file_name, tensors in SHARDS.items():
            made = {tensor: version_bits(tensor, *kind, version) for tensor, kind in tensors.items()}
            save_file(made, directory / file_name, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(tensors, file_name))
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        (directory / "config.json").write_text('{"model_type": "made-up"}')
        return directory

    return make


def version_bits(name: str, shape: tuple[int, ...], dtype: torch.dtype, version: int) -> torch.Tensor:
    """Random bits, NaNs among them; every version changes about 1 % of the cells of every other tensor."""
    width = torch.empty((), dtype=dtype).element_size()
    rng = torch.Generator().manual_seed(sum(name.encode()))
    high = 2 if dtype == torch.bool else 120
    cells = torch.randint(0, high, (*shape, width), generator=rng, dtype=torch.uint8).view(SIZES[width]).reshape(shape)
    for step in range(1, version + 1):
        if (step + len(name)) % 2 or not cells.numel():
            continue
        count = max(1, cells.numel() // 100)
        places = torch.randint(0, cells.numel(), (count,), generator=rng)
        cells.view(-1)[places] ^= 1
    return cells.view(dtype)
