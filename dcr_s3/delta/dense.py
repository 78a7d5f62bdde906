"""Dense codings: every cell of a block, as byte planes, through zstd.

A plane holds one byte of each cell (plane 0 the lowest), planes follow each other. Sign and exponent bytes of
neighbouring weights resemble each other and the low mantissa bytes do not, so planes compress better than cells.
"""

from __future__ import annotations

import threading
from typing import cast

import numpy as np
import numpy.typing as npt
import zstandard

from dcr_s3.delta.changes import CELL_TYPES, Cells
from dcr_s3.errors import CorruptObject

_LEVEL = 1
_contexts = threading.local()


def _compressor() -> zstandard.ZstdCompressor:
    """One per thread: creating one costs more than compressing a small block."""
    if not hasattr(_contexts, "compressor"):
        _contexts.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True)
    return cast(zstandard.ZstdCompressor, _contexts.compressor)


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_contexts, "decompressor"):
        _contexts.decompressor = zstandard.ZstdDecompressor()
    return cast(zstandard.ZstdDecompressor, _contexts.decompressor)


def pack(cells: Cells) -> bytes:
    """One zstd frame with the byte planes of ``cells``."""
    planes = np.ascontiguousarray(cells.view(np.uint8).reshape(len(cells), cells.itemsize).T)
    return _compressor().compress(planes.data)


def unpack(payload: bytes | memoryview, cells: int, cell_bytes: int) -> Cells:
    """Inverse of :func:`pack`: ``cells`` cells of ``cell_bytes`` bytes.

    Raises CorruptObject unless ``payload`` is exactly one frame that declares and holds that many bytes; nothing
    larger is ever allocated.
    """
    size_bytes = cells * cell_bytes
    try:
        declared = zstandard.get_frame_parameters(payload).content_size
        if declared != size_bytes:
            raise CorruptObject(f"a dense block of {size_bytes} bytes declares {declared}")
        raw = _decompressor().decompress(payload, max_output_size=size_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptObject(f"a dense block does not decompress: {error}") from error
    if len(raw) != size_bytes:
        raise CorruptObject(f"a dense block of {size_bytes} bytes holds {len(raw)}")
    planes = np.frombuffer(raw, np.uint8).reshape(cell_bytes, cells)
    joined: npt.NDArray[np.uint8] = np.ascontiguousarray(planes.T)
    return joined.reshape(-1).view(CELL_TYPES[cell_bytes])
