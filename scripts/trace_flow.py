#!/usr/bin/env python3
"""Sends a recorded trace through `dcr-s3 init`, `publish` and `pull` and compares every mirror bit for bit.

A trace directory holds `base.safetensors` and, per branch and step, `<branch>_step<k>.npz` with the gaps between
changed flat indices (`I/<name>`) and the new bits (`V/<name>`). Runs on the embedded S3 server and on SeaweedFS:

    .venv/bin/python scripts/trace_flow.py --trace ../shared/trace
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console

from dcr_s3.cli.demo.bits import differing_tensors
from dcr_s3.cli.output import percent, ratio, size
from dcr_s3.cli.tables import table
from dcr_s3.testing.servers import EmbeddedS3, LocalServer, SeaweedServer

BUCKET = "trace"
SERVERS = {"moto": EmbeddedS3, "seaweedfs": SeaweedServer}


def tensor_views(body: bytearray) -> dict[str, np.ndarray]:
    """Every tensor of a safetensors file of 16-bit elements, as a flat uint16 view of its bytes."""
    header_bytes = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + header_bytes])
    data = memoryview(body)[8 + header_bytes :]
    spans = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: np.frombuffer(data[begin:end], np.uint16) for name, (begin, end) in spans.items()}


def write_versions(trace: Path, branch: str, home: Path) -> list[Path]:
    """One checkpoint directory per version of a branch, version 0 first."""
    body = bytearray((trace / "base.safetensors").read_bytes())
    tensors = tensor_views(body)
    directories = [write_checkpoint(home / branch / "0", body)]
    while (step := trace / f"{branch}_step{len(directories)}.npz").exists():
        with np.load(step) as changes:
            for key in changes.files:
                if key.startswith("I/"):
                    tensors[key[2:]][np.cumsum(changes[key], dtype=np.int64)] = changes[f"V/{key[2:]}"]
        directories.append(write_checkpoint(home / branch / str(len(directories)), body))
    return directories


def write_checkpoint(directory: Path, body: bytearray) -> Path:
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(body)
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    return directory


def dcr(environment: dict[str, str], *arguments: object) -> dict:
    """Runs one `dcr-s3` command in a process of its own and returns its JSON object."""
    command = [str(Path(sys.executable).with_name("dcr-s3")), *map(str, arguments), "--json"]
    done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with code {done.returncode}")
    return json.loads(done.stdout)


def flow(server: LocalServer, branch: str, versions: list[Path], home: Path) -> Iterator[tuple[str, ...]]:
    """Publishes and pulls every version of one branch; one table row each. Exits if any mirror differs."""
    url = f"s3://{BUCKET}/{branch}"
    base, mirror, late = versions[0], home / "mirror", home / "late"
    environment = {**server.environment, "DCR_STATE_DIR": str(home / "state")}
    dcr(environment, "init", url, "--base", base)
    for step, directory in enumerate(versions[1:], 1):
        sent = dcr(environment, "publish", url, directory, "--step", step)
        got = dcr(environment, "pull", url, mirror, "--base", base)
        require_equal(directory, mirror)
        yield (
            str(sent["version"]),
            percent(sent["changed_elements"], sent["total_elements"]),
            size(sent["wire_bytes"]),
            ratio(sent["dense_bytes"], sent["wire_bytes"]),
            f"{sent['seconds']['total']:.2f} s",
            f"{got['seconds']['total']:.2f} s",
            "equal",
        )
    got = dcr(environment, "pull", url, late, "--base", base)
    require_equal(versions[-1], late)
    dcr(environment, "verify", url, late)
    yield (f"0-{got['version']}", "", size(got["wire_bytes"]), "", "", f"{got['seconds']['total']:.2f} s", "equal")


def require_equal(one: Path, other: Path) -> None:
    wrong = differing_tensors(one, other)
    if wrong:
        sys.exit(f"{other} differs from {one} in {', '.join(wrong)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=Path(__file__).parents[2] / "shared" / "trace")
    parser.add_argument("--branch", action="append", help="default: lr1e-6 and lr5e-6")
    parser.add_argument("--server", action="append", choices=list(SERVERS), help="default: all")
    arguments = parser.parse_args()
    columns = ("<server", "<branch", "version", "changed", "bytes", "less", "publish", "pull", "<mirror")
    shown = table("recorded steps through init, publish and pull", *columns)
    with tempfile.TemporaryDirectory(prefix="dcr-s3-trace-") as home_name:
        home = Path(home_name)
        for branch in arguments.branch or ["lr1e-6", "lr5e-6"]:
            versions = write_versions(arguments.trace, branch, home)
            for name in arguments.server or SERVERS:
                with SERVERS[name]() as server:
                    server.create_bucket(BUCKET)
                    work = home / name / branch
                    work.mkdir(parents=True)
                    for row in flow(server, branch, versions, work):
                        shown.add_row(name, branch, *row)
                    shutil.rmtree(work)
    Console().print(shown)


if __name__ == "__main__":
    main()
