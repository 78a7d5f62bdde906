"""`run.json`: what never changes during a run. The table of canonical tensors and the digest of version 0."""

from __future__ import annotations

from math import prod
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from dcr_s3.format import limits
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.document import HEX_32, Document, Part
from dcr_s3.format.dtypes import DTYPES, Dtype


class TensorSpec(Part):
    """One canonical tensor.

    ``aliases`` are further names of the same storage (tied weights); ``digest`` is of version 0.
    """

    name: str = Field(min_length=1, max_length=limits.NAME_BYTES)
    dtype: str
    shape: tuple[int, ...] = Field(max_length=limits.TENSOR_DIMS)
    digest: str = Field(pattern=HEX_32)
    aliases: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        if self.dtype not in DTYPES:
            raise ValueError(f"tensor {self.name}: unknown dtype {self.dtype!r}")
        if any(n < 0 for n in self.shape) or prod(self.shape) > limits.TENSOR_CELLS:
            raise ValueError(f"tensor {self.name}: impossible shape {self.shape}")
        self.type.cells(prod(self.shape))
        return self

    @property
    def type(self) -> Dtype:
        return DTYPES[self.dtype]

    @property
    def cells(self) -> int:
        """Number of cells; canonical cell indices run from 0 to this."""
        return self.type.cells(prod(self.shape))

    @property
    def size_bytes(self) -> int:
        return self.cells * self.type.cell_bytes


class Run(Document):
    """A run's identity: created once, chained to by the first manifest."""

    MAGIC: ClassVar[str] = "dcr_s3/run"
    magic: Literal["dcr_s3/run"] = "dcr_s3/run"

    run_id: str = Field(pattern=HEX_32)
    created_at: str = Field(max_length=40)
    coding: Literal["context", "context-free"] = "context"
    state: str = Field(pattern=HEX_32)
    tensors: tuple[TensorSpec, ...] = Field(min_length=1, max_length=limits.TENSORS)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [name for t in self.tensors for name in (t.name, *t.aliases)]
        if len(set(names)) != len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise ValueError(f"tensor name {twice!r} stands twice")
        total = StateDigest()
        for t in self.tensors:
            total += StateDigest.from_hex(t.digest)
        if total.hex() != self.state:
            raise ValueError("state is not the sum of the tensors' digests")
        return self

    @property
    def dense_bytes(self) -> int:
        """Bytes of one full copy."""
        return sum(t.size_bytes for t in self.tensors)

    @property
    def total_elements(self) -> int:
        """Cells of all tensors."""
        return sum(t.cells for t in self.tensors)
