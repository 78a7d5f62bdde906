"""Reads pieces of training tensors as cells, in the dtype that receivers store."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dcr_s3.errors import BadInput
from dcr_s3.format.cells import Cells
from dcr_s3.mapping.cells import flat_cells, torch_dtype
from dcr_s3.mapping.part import Shard
from dcr_s3.mapping.view import View


class Reader:
    """Shards by key. A piece of a contiguous CPU tensor that needs no cast is a view of the training tensor's memory;
    others are copies, made one piece at a time.
    """

    def __init__(self, shards: Mapping[str, Shard]) -> None:
        self._shards = shards
        self._plain: tuple[str, torch.Tensor] | None = None

    def __contains__(self, key: str) -> bool:
        return key in self._shards

    def cells(self, key: str, here: View, dtype: str) -> Cells:
        """The piece's cells, flat, in host memory, rounded to nearest even to ``dtype`` where the tensor is wider.

        Raises ``BadInput`` for a cast that is no rounding of floats.
        """
        shard = self._shards[key]
        wanted = torch_dtype(dtype)
        box = self._row_major(shard).as_strided(
            here.shape, here.strides, self._row_major(shard).storage_offset() + here.start
        )
        if box.dtype != wanted:
            if not (box.is_floating_point() and wanted.is_floating_point):
                raise BadInput(f"tensor {key}: is {box.dtype}, the run stores {dtype}; only floats are cast")
            box = box.to(wanted)
        return flat_cells(box.contiguous().reshape(-1))

    def _row_major(self, shard: Shard) -> torch.Tensor:
        if shard.tensor.is_contiguous():
            return shard.tensor
        if self._plain is None or self._plain[0] != shard.key:
            self._plain = (shard.key, shard.tensor.contiguous())
        return self._plain[1]
