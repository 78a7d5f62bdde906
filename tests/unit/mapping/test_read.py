"""Pieces of training tensors as stored bits: rounding, strides, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dcr_s3.errors import BadInput
from dcr_s3.mapping.part import Shard, whole
from dcr_s3.mapping.read import Reader
from dcr_s3.mapping.view import View


def reader(tensor: torch.Tensor) -> Reader:
    return Reader({"w": Shard("w", tensor, whole("w", tensor), torch.bfloat16)})


def test_fp32_is_rounded_to_nearest_even_as_integer_arithmetic_says() -> None:
    bits = np.random.default_rng(3).integers(0, 2**32, 200_000, np.uint64).astype(np.uint32)
    ties = (bits[:50_000] & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    special = np.array([0, 0x80000000, 1, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x00007FFF, 0x00008001], np.uint32)
    bits = np.concatenate([bits, ties, special])
    numbers = (bits & 0x7F800000) != 0x7F800000
    infinite = (bits & 0x7FFFFFFF) == 0x7F800000
    bits = bits[numbers | infinite]
    tensor = torch.from_numpy(bits.view(np.float32).copy())
    found = reader(tensor).cells("w", View.of(tensor.shape), "BF16")
    wide = bits.astype(np.uint64)
    expected = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(found, expected)


def test_not_a_number_stays_one() -> None:
    tensor = torch.tensor([float("nan"), -float("nan")])
    found = reader(tensor).cells("w", View.of((2,)), "BF16")
    assert all((cell & 0x7FFF) > 0x7F80 for cell in found.tolist())


def test_a_tensor_with_any_strides_is_read_in_its_logical_order() -> None:
    tensor = torch.arange(60, dtype=torch.int32).reshape(3, 4, 5).permute(2, 0, 1)[1:]
    view = View.of(tensor.shape).narrow(1, 1, 2)
    expected = tensor[:, 1:3].reshape(-1).numpy()
    np.testing.assert_array_equal(reader(tensor).cells("w", view, "I32").view(np.int32), expected)


def test_a_piece_without_cast_shares_the_tensors_memory() -> None:
    tensor = torch.zeros(4, 6, dtype=torch.bfloat16)
    cells = reader(tensor).cells("w", View.of((4, 6)).narrow(0, 1, 2), "BF16")
    tensor[1, 0] = 1.0
    assert cells[0] == 0x3F80


def test_only_floats_are_cast() -> None:
    with pytest.raises(BadInput, match=r"tensor w: is torch\.int32, the run stores BF16; only floats are cast"):
        reader(torch.zeros(3, dtype=torch.int32)).cells("w", View.of((3,)), "BF16")
