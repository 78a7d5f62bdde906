"""Torch views of made-up states."""

from __future__ import annotations

import torch

from dcr_s3.testing.checkpoints import State

TORCH = {
    "BOOL": torch.bool,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
}


def tensors(state: State) -> dict[str, torch.Tensor]:
    """The state as torch tensors with the same bits."""
    return {
        name: torch.frombuffer(bytearray(t.cells.tobytes()) or bytearray(8), dtype=TORCH[t.dtype.name])[
            : t.cells.size
        ].reshape(t.shape)
        for name, t in state.items()
    }
