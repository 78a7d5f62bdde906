"""Delta-compressed refit over S3: publish policy versions as the bits that changed, pull them bit-exact."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dcr_s3.errors import DcrError
from dcr_s3.receiver import Receiver, verify_directory
from dcr_s3.reports import PublishReport, PullReport, VerifyReport

if TYPE_CHECKING:
    from dcr_s3.sender import Sender
    from dcr_s3.sending.init import init_run

__version__ = "0.1.0"

__all__ = [
    "DcrError",
    "PublishReport",
    "PullReport",
    "Receiver",
    "Sender",
    "VerifyReport",
    "__version__",
    "init_run",
    "verify_directory",
]


_WITH_TORCH = {"Sender": "dcr_s3.sender", "init_run": "dcr_s3.sending.init"}


def __getattr__(name: str) -> Any:
    """The sender's names, when asked for: it needs torch, whose import a mirror should not have to wait for."""
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WITH_TORCH[name]), name)
