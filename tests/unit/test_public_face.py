"""`import dcr_s3`: every public name is there, and a mirror does not wait for torch."""

import subprocess
import sys

import pytest

import dcr_s3


def test_every_public_name_is_there() -> None:
    assert all(hasattr(dcr_s3, name) for name in dcr_s3.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Sendr"):
        _ = dcr_s3.Sendr  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", ["dcr_s3", "dcr_s3.receiver", "dcr_s3.cli.pulling"])
def test_a_mirror_does_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
