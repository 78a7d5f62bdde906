"""Runs scripts in the serving engine's own environment, against an S3 server of this test session."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"

Run = Callable[..., list[dict[str, Any]]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests here need the engine's environment, and run one after the other in one worker."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.xdist_group("engine"))
            if not PYTHON.exists():
                item.add_marker(pytest.mark.skip(reason="no .venv-vllm: scripts/test installs it"))


@pytest.fixture
def engine_script() -> Run:
    """Runs a script beside this file and returns the JSON objects that it prints, one a line."""

    def run(name: str, *arguments: str, timeout_s: float = 600) -> list[dict[str, Any]]:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"}
        environment.setdefault("VLLM_CACHE_ROOT", str(ROOT / ".venv-vllm" / "cache"))
        done = subprocess.run(
            [PYTHON, HERE / name, *arguments],
            capture_output=True,
            text=True,
            env=environment,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-6000:]
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    return run
