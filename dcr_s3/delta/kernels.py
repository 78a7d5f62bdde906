"""Which implementation of the kernels runs: the C extension where it was built, or the NumPy reference.

The environment variable ``DCR_KERNELS`` forces one: ``native`` (an error where the extension is missing),
``reference``, or ``auto`` (the default).
"""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType

from dcr_s3.errors import ConfigError


@functools.cache
def active() -> ModuleType:
    """The module whose kernels run in this process. Raises ConfigError for a choice that cannot be met."""
    choice = os.environ.get("DCR_KERNELS", "auto")
    if choice not in ("auto", "native", "reference"):
        raise ConfigError(f"DCR_KERNELS is {choice!r}; use auto, native or reference")
    if choice != "reference":
        try:
            return importlib.import_module("dcr_s3.delta.native")
        except ImportError as error:
            if choice == "native":
                raise ConfigError(f"DCR_KERNELS=native, but the C extension cannot be loaded: {error}") from error
    return importlib.import_module("dcr_s3.delta.reference")


def kernel_name() -> str:
    """``native`` or ``reference``."""
    return active().__name__.rpartition(".")[2]
