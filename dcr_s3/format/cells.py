"""The array type in which stored bits travel through the package."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Cells = npt.NDArray[np.unsignedinteger[Any]]
"""Flat cells: little-endian unsigned integers of 1, 2, 4 or 8 bytes, perhaps unaligned, perhaps read-only."""
