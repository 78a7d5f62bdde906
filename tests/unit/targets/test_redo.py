"""Redo files: what was appended comes back, may be applied repeatedly, and damage is noticed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dcr_s3.errors import CorruptObject
from dcr_s3.format.region import Region
from dcr_s3.targets.redo import RedoRecord, RedoWriter, apply_record, read_redo


def make_records() -> list[RedoRecord]:
    strided = Region(1, 1, (2, 3), (5, 1))
    return [
        RedoRecord((Region.run(0, 2, 4),), np.array([0, 3], "<u4"), np.array([7, 9], "<u2")),
        RedoRecord((strided, Region.run(1, 9, 1)), np.array([0, 4, 6], "<u4"), np.array([1, 2, 3], "<u2")),
    ]


def written(path: Path) -> Path:
    writer = RedoWriter(path)
    for record in make_records():
        writer.append(record)
    writer.close()
    return path


def test_records_are_applied_in_canonical_coordinates_to_every_copy(tmp_path: Path) -> None:
    tensors = {0: [np.zeros(8, "<u2")], 1: [np.zeros(10, "<u2"), np.full(10, 50, "<u2")]}
    path = written(tmp_path / "x.redo")
    for _ in range(2):
        for record in read_redo(path):
            apply_record(record, tensors.__getitem__)
    assert tensors[0][0].tolist() == [0, 0, 7, 0, 0, 9, 0, 0]
    assert tensors[1][0].tolist() == [0, 1, 0, 0, 0, 0, 0, 2, 0, 3]
    assert tensors[1][1].tolist() == [50, 1, 50, 50, 50, 50, 50, 2, 50, 3]


def test_every_truncation_and_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "x.redo")
    whole = path.read_bytes()
    boundaries = {0, 32 + 32 + 8 + 4}
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CorruptObject):
            list(read_redo(path))
        path.write_bytes(whole[:at])
        if at not in boundaries:
            with pytest.raises(CorruptObject):
                list(read_redo(path))
