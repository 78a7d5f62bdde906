#!/usr/bin/env python3
"""Peak memory of publishing and pulling a large checkpoint, beyond imports and memory-mapped files.

Makes a checkpoint of --size-gb and a version with --changed of its values changed, publishes and pulls it through a
real server in processes of their own, and prints each one's peak of anonymous memory above what its imports took.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from dcr_s3.format.dtypes import DTYPES
from dcr_s3.testing.checkpoints import Tensor, write_safetensors
from dcr_s3.testing.servers import SeaweedServer

TENSOR_CELLS = 32 << 20
GIB = 1 << 30


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not tell anonymous memory (Linux is needed)")


def watched(job: str, url: str, directory: str, base: str) -> None:
    """Runs one job in this process and prints its peak."""
    from dcr_s3 import Receiver, Sender

    floor = anonymous_bytes()
    peak = floor
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    begun = time.monotonic()
    if job == "publish":
        with Sender.open(url, fence=False) as sender:
            report = sender.publish(Path(directory)).model_dump()
    else:
        report = Receiver(url, directory, base=base).pull().model_dump()
    seconds = time.monotonic() - begun
    done.set()
    thread.join()
    print(json.dumps({"job": job, "peak_mib": (peak - floor) / (1 << 20), "seconds": seconds, "report": report}))


def make(directory: Path, size_bytes: int, fraction: float) -> None:
    """A base and one version of it, tensor by tensor."""
    rng = np.random.default_rng(0)
    tile = (rng.normal(0, 0.02, TENSOR_CELLS + 4096).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    for version in (0, 1):
        (directory / f"v{version}").mkdir()
    weight_map = {}
    for number in range(size_bytes // (2 * TENSOR_CELLS)):
        name, file = f"layer.{number}.weight", f"model-{number:05d}.safetensors"
        weight_map[name] = file
        cells = tile[number * 7 % 4096 :][:TENSOR_CELLS].copy()
        for version in (0, 1):
            if version:
                hit = rng.integers(0, TENSOR_CELLS, int(TENSOR_CELLS * fraction))
                cells[hit] ^= 1
            tensor = Tensor(DTYPES["BF16"], (TENSOR_CELLS // 4096, 4096), cells)
            write_safetensors(directory / f"v{version}" / file, {name: tensor})
    for version in (0, 1):
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / f"v{version}" / "model.safetensors.index.json").write_text(json.dumps(index))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-gb", type=float, default=4.0)
    parser.add_argument("--changed", type=float, default=0.01)
    parser.add_argument("--dir", type=Path, help="where to put about four times the size")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--job", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        watched(*arguments.job)
        return
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="dcr-memory-") as name, SeaweedServer() as server:
        directory = Path(name)
        make(directory, int(arguments.size_gb * GIB), arguments.changed)
        server.create_bucket("memory")
        url = "s3://memory/run"
        environment = {**os.environ, **server.environment, "DCR_STATE_DIR": str(directory / "state")}
        subprocess.run(
            [sys.executable, "-c", f"import dcr_s3; dcr_s3.init_run({url!r}, {str(directory / 'v0')!r})"],
            env=environment,
            check=True,
        )
        results = []
        for job, target in (("publish", "v1"), ("pull", "mirror")):
            command = [sys.executable, __file__, "--job", job, url, str(directory / target), str(directory / "v0")]
            output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
            results.append(json.loads(output))
    if arguments.json:
        print(json.dumps(results))
        return
    for result in results:
        report = result["report"]
        density = report["changed_elements"] / report["total_elements"]
        print(
            f"{result['job']:8} {report['dense_bytes'] / 1e9:.2f} GB, {density:.2%} changed: "
            f"peak {result['peak_mib']:.0f} MiB beyond imports and mapped files, {result['seconds']:.1f} s"
        )


if __name__ == "__main__":
    main()
