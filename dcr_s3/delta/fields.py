"""A cell's bits as numbers: its exponent field, and the order in which neighbouring values lie side by side."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from dcr_s3.delta.changes import Cells
from dcr_s3.delta.model import HazardModel
from dcr_s3.delta.tables import CLASSES
from dcr_s3.format.dtypes import Dtype


class Order(IntEnum):
    """How cells map to unsigned integers of the same width that grow with the value. Each is a bijection."""

    UNSIGNED = 0
    SIGNED = 1
    """Two's complement: the top bit flips."""
    FLOAT = 2
    """Sign and magnitude: negative cells flip all bits, others the top bit. NaN and infinities just lie outermost."""


@dataclass(frozen=True)
class Fields:
    """What the kernels need to know of an element type."""

    cell_bytes: int
    order: Order
    exponent_shift: int
    exponent_mask: int
    """Largest exponent field; 0 where the type has none."""

    @classmethod
    def of(cls, dtype: Dtype) -> Fields:
        """Fields of ``dtype``."""
        if dtype.exponent_bits and dtype.bits >= 8:
            return cls(dtype.cell_bytes, Order.FLOAT, dtype.mantissa_bits, (1 << dtype.exponent_bits) - 1)
        order = Order.SIGNED if dtype.name in ("I8", "I16", "I32", "I64") else Order.UNSIGNED
        return cls(dtype.cell_bytes, order, 0, 0)

    def exponents(self, cells: Cells) -> Cells:
        """Exponent field of each cell."""
        fields: Cells = (cells >> cells.dtype.type(self.exponent_shift)) & cells.dtype.type(self.exponent_mask)
        return fields

    def classes(self, cells: Cells, model: HazardModel) -> npt.NDArray[np.int64]:
        """Class of each cell under ``model``, 0 to 15; 0 where the model has one class."""
        if len(model.codes) == 1:
            return np.zeros(len(cells), np.int64)
        return np.clip(self.exponents(cells).astype(np.int64) - model.first_exponent, 0, CLASSES - 1)

    def ordered(self, cells: Cells) -> Cells:
        """Cells as integers that grow with the value."""
        if self.order is Order.UNSIGNED:
            return cells
        if self.order is Order.SIGNED:
            return self._flip_top(cells)
        return np.where(cells & self._top(cells), ~cells, self._flip_top(cells))

    def unordered(self, numbers: Cells) -> Cells:
        """Inverse of :meth:`ordered`."""
        if self.order is Order.UNSIGNED:
            return numbers
        if self.order is Order.SIGNED:
            return self._flip_top(numbers)
        return np.where(numbers & self._top(numbers), self._flip_top(numbers), ~numbers)

    def _flip_top(self, cells: Cells) -> Cells:
        flipped: Cells = cells ^ self._top(cells)
        return flipped

    def _top(self, cells: Cells) -> Any:
        return cells.dtype.type(1 << (8 * self.cell_bytes - 1))
