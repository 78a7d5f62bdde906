"""Local disk trouble as errors a person can act on."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dcr_s3.errors import BadInput, DiskFull

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns "no space", "no permission" and "read-only" into ``DiskFull`` and ``BadInput`` that name the path."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFull(
                f"{path}: no space left; nothing is lost. Free some space and run the same command again"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise BadInput(f"{path}: {error.strerror}") from error
        raise
