"""The distribution: what is in it, and that it says what it should."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist, and the wheel built from it: without a compiler, which takes long and is optional."""
    output = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output), str(ROOT)]
    environment = {**os.environ, "CC": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return output


def test_the_wheel_holds_the_package(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = Parser().parsestr(archive.read(next(n for n in names if n.endswith("/METADATA"))).decode())
        entries = archive.read(next(n for n in names if n.endswith("/entry_points.txt"))).decode()
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "dcr_s3").rglob("*.py") if "__pycache__" not in p.parts}
    assert modules <= set(names)
    assert {"dcr_s3/py.typed", "dcr_s3/dashboard/page.css"} <= set(names)
    assert not [n for n in names if n.startswith(("tests/", "scripts/", "infra/"))]
    assert (metadata["Name"], metadata["Version"], metadata["License-Expression"]) == ("dcr-s3", "0.1.0", "Apache-2.0")
    assert metadata["Requires-Python"] == ">=3.11"
    assert "dcr-s3 = dcr_s3.cli.app:main" in entries


def test_the_sdist_can_be_built_anywhere(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "dcr_s3").rglob("*.[ch]")}
    assert sources
    assert sources | {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= names
