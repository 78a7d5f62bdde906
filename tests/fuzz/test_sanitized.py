"""The compiled kernels under address and undefined-behaviour sanitizers, fed random blocks and damaged streams."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dcr_s3.delta.tables import SURVIVAL

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "dcr_s3" / "delta" / "native"
ROUNDS = int(os.environ.get("DCR_FUZZ_ROUNDS", "5000"))


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    target = tmp_path_factory.mktemp("fuzz") / "fuzz_kernels"
    sources = [path for path in sorted(NATIVE.glob("*.c")) if not path.name.startswith("module")]
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command = [
        compiler,
        "-std=gnu11",
        "-O1",
        *sanitizers,
        f"-I{NATIVE}",
        Path(__file__).with_name("fuzz_kernels.c"),
    ]
    subprocess.run([*command, *sources, "-lm", "-pthread", "-o", target], check=True)
    return target


@pytest.mark.slow
def test_no_stream_makes_the_kernels_misbehave(program: Path) -> None:
    for seed in ("1", "2"):
        run = subprocess.run(
            [program, seed, str(ROUNDS)], input=SURVIVAL.tobytes(), capture_output=True, timeout=300, check=False
        )
        assert run.returncode == 0, run.stderr.decode()
        assert run.stdout.startswith(f"{ROUNDS} rounds".encode())
