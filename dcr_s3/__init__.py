"""Delta-compressed refit over S3: publish policy versions as the bits that changed, pull them bit-exact."""

from dcr_s3.errors import DcrError
from dcr_s3.receiver import Receiver, verify_directory
from dcr_s3.reports import PublishReport, PullReport, VerifyReport
from dcr_s3.sender import Sender, init_run

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
