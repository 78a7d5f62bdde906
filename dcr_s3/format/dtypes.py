"""Element types: what safetensors names them, how wide one stored cell is.

A *cell* is the unit that is compared, indexed and sent: one element for types of whole bytes, one byte for packed types
(F4, F6). All canonical indices count cells. Nothing in this project ever interprets a cell as a number to compare it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dtype:
    """One element type of the checkpoint format.

    ``name`` is safetensors' name, ``code`` its number in segment indexes (never reused), ``bits`` the size of one
    element, ``exponent_bits`` and ``mantissa_bits`` describe sign-magnitude floats (0 where a type has no such fields).
    """

    name: str
    code: int
    bits: int
    exponent_bits: int = 0
    mantissa_bits: int = 0

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell: 1, 2, 4 or 8."""
        return max(1, self.bits // 8)

    def cells(self, elements: int) -> int:
        """Cells that hold ``elements`` elements. Raises ValueError where packed elements do not fill whole bytes."""
        total_bits = elements * self.bits
        if total_bits % 8:
            raise ValueError(f"{elements} elements of {self.name} do not fill whole bytes")
        return total_bits // 8 // self.cell_bytes


_ALL = (
    Dtype("BOOL", 1, 8),
    Dtype("U8", 2, 8),
    Dtype("I8", 3, 8),
    Dtype("F8_E4M3", 4, 8, 4, 3),
    Dtype("F8_E5M2", 5, 8, 5, 2),
    Dtype("F8_E8M0", 6, 8),
    Dtype("I16", 7, 16),
    Dtype("U16", 8, 16),
    Dtype("F16", 9, 16, 5, 10),
    Dtype("BF16", 10, 16, 8, 7),
    Dtype("I32", 11, 32),
    Dtype("U32", 12, 32),
    Dtype("F32", 13, 32, 8, 23),
    Dtype("I64", 14, 64),
    Dtype("U64", 15, 64),
    Dtype("F64", 16, 64, 11, 52),
    Dtype("C64", 17, 64),
    Dtype("F4", 18, 4),
    Dtype("F6_E2M3", 19, 6),
    Dtype("F6_E3M2", 20, 6),
)

DTYPES: dict[str, Dtype] = {d.name: d for d in _ALL}
DTYPES_BY_CODE: dict[int, Dtype] = {d.code: d for d in _ALL}
