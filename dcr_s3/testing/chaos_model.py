"""A checkpoint of random bits that changes a little at every step, written without the package's help."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

FILE = "model.safetensors"
TENSORS = 64
CHANGED = 0.01
"""Share of the cells that change at a step."""
_KEPT = 4


class ChaosModel:
    """State ``newest`` in a directory of its own; the first state and the last few are kept too."""

    def __init__(self, root: Path, seed: int, size_bytes: int) -> None:
        self.root = root
        self.newest = 0
        self._dice = np.random.default_rng(seed)
        cells = size_bytes // 2 // TENSORS
        self._cells = self._dice.integers(0, 1 << 16, cells * TENSORS, dtype=np.uint16)
        entries = {
            f"layer.{n}.weight": {
                "dtype": "BF16",
                "shape": [cells],
                "data_offsets": [2 * n * cells, 2 * (n + 1) * cells],
            }
            for n in range(TENSORS)
        }
        raw = json.dumps(entries).encode()
        self._header = len(raw).to_bytes(8, "little") + raw
        self._write()

    def directory(self, step: int) -> Path:
        """The checkpoint of one state."""
        return self.root / f"state-{step}"

    def step(self) -> None:
        """Changes some cells by a few units in the last place, as an optimiser does."""
        count = int(CHANGED * self._cells.size)
        places = self._dice.choice(self._cells.size, count, replace=False)
        self._cells[places] += self._dice.integers(1, 4, count, dtype=np.uint16)
        self.newest += 1
        self._write()
        if self.newest > _KEPT:
            shutil.rmtree(self.directory(self.newest - _KEPT))

    def holds(self, step: int, directory: Path) -> bool:
        """True where a directory holds a state's bits."""
        mine = self.directory(step) / FILE
        return mine.is_file() and mine.read_bytes() == (directory / FILE).read_bytes()

    def _write(self) -> None:
        self.directory(self.newest).mkdir(parents=True)
        (self.directory(self.newest) / FILE).write_bytes(self._header + self._cells.tobytes())
