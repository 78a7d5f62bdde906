"""Checkpoint directories: every safetensors dtype, several shards, and what is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcr_s3.errors import BadInput
from dcr_s3.format.dtypes import DTYPES
from dcr_s3.targets.checkpoint import Checkpoint


def write_raw(path: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def one_tensor(directory: Path, **changes: Any) -> None:
    entry = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12], **changes}
    write_raw(directory / "model.safetensors", {"w": entry}, bytes(range(12)))


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_is_mapped_as_bits(tmp_path: Path, name: str) -> None:
    dtype = DTYPES[name]
    size = 16 * dtype.bits // 8
    data = np.random.default_rng(0).bytes(size)
    header = {
        "pad": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "w": {"dtype": name, "shape": [4, 4], "data_offsets": [3, 3 + size]},
        "__metadata__": {"format": "pt"},
    }
    write_raw(tmp_path / "model.safetensors", header, b"pad" + data)
    cells = Checkpoint.open(tmp_path).cells("w")
    assert cells.tobytes() == data
    assert cells.itemsize == dtype.cell_bytes
    assert cells.size == dtype.cells(16)


def test_an_index_names_the_shards(tmp_path: Path) -> None:
    for number in (1, 2):
        entry = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
        write_raw(tmp_path / f"m-{number}.safetensors", {f"t{number}": entry}, bytes([number] * 2))
    write_raw(tmp_path / "consolidated.safetensors", {}, b"")
    index = {"weight_map": {"t1": "m-1.safetensors", "t2": "m-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = Checkpoint.open(tmp_path)
    assert {n: checkpoint.cells(n).tolist() for n in checkpoint} == {"t1": [1, 1], "t2": [2, 2]}
    assert checkpoint.tensor_files == ["m-1.safetensors", "m-2.safetensors"]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    index = {"weight_map": {"t1": "m-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadInput, match=r"m-1\.safetensors.*missing"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("file", ["../m.safetensors", "/etc/passwd", ".hidden"])
def test_an_index_cannot_lead_out_of_the_directory(tmp_path: Path, file: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": file}}))
    with pytest.raises(BadInput, match="missing"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "F128"}, "w has dtype 'F128'"),
        ({"shape": [2, 4]}, "tensor w of shape"),
        ({"shape": [-2, -3]}, "impossible"),
        ({"shape": [2.5]}, "impossible"),
        ({"data_offsets": [4, 16]}, "does not lie"),
        ({"data_offsets": [0]}, "malformed"),
        ({"dtype": "F4", "shape": [23]}, "whole bytes"),
    ],
)
def test_a_contradictory_header_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    one_tensor(tmp_path, **change)
    with pytest.raises(BadInput, match=message):
        Checkpoint.open(tmp_path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    one_tensor(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(BadInput, match=r"model\.safetensors"):
            Checkpoint.open(tmp_path)


def test_no_checkpoint_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no safetensors"):
        Checkpoint.open(tmp_path)
    with pytest.raises(BadInput, match="no such file"):
        Checkpoint.open(tmp_path / "absent")


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        entry = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
        write_raw(tmp_path / f"{name}.safetensors", {"w": entry}, b"x")
    with pytest.raises(BadInput, match=r"w is in a\.safetensors and in b\.safetensors"):
        Checkpoint.open(tmp_path)
