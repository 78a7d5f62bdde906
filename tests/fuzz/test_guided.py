"""The decoders under clang's libFuzzer, where clang has it: inputs that reach new code are kept and changed further."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
NATIVE = ROOT / "dcr_s3" / "delta" / "native"
RUNS = int(os.environ.get("DCR_FUZZ_ROUNDS", "5000"))


def build(directory: Path) -> Path:
    """The fuzzer, or a skip that says what is missing."""
    compiler = shutil.which("clang")
    if compiler is None:
        pytest.skip("no clang")
    target = directory / "fuzz_decoders"
    sources = [path for path in sorted(NATIVE.glob("*.c")) if not path.name.startswith("module")]
    options = ["-std=gnu11", "-O1", "-gline-tables-only", "-fsanitize=fuzzer,address"]
    command = [compiler, *options, f"-I{NATIVE}", HERE / "fuzz_decoders.c", *sources, "-lm", "-pthread", "-o", target]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if "libclang_rt.fuzzer" in built.stderr:
        pytest.skip("clang has no libFuzzer; Debian has it in libclang-rt-dev")
    assert built.returncode == 0, built.stderr
    return target


@pytest.mark.slow
def test_inputs_that_reach_new_code_do_no_harm(tmp_path: Path) -> None:
    program = build(tmp_path)
    subprocess.run([sys.executable, HERE / "seeds.py", tmp_path], check=True)
    run = subprocess.run(
        [program, f"-runs={RUNS}", "-max_len=20000", "-timeout=20", "-seed=1", tmp_path / "inputs"],
        env={**os.environ, "DCR_SURVIVAL": str(tmp_path / "survival")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    covered = [int(line.split("cov: ")[1].split()[0]) for line in run.stderr.splitlines() if "cov: " in line]
    assert covered[-1] > covered[0], "no input reached anything that the sound ones do not"
