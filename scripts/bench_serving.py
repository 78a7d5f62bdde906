"""What staging a version costs running requests: tokens a second of a vLLM server, without and with it.

Usage: bench_serving.py [--json] [--window 3] [--windows 12]. Runs itself in the serving engine's environment
(scripts/test installs it). Clients ask throughout; in every other window the server fetches, verifies, decodes and
stages the same version over and over, which is more than any run would ask of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from time import monotonic, sleep
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ENGINE_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
ENGINE_TESTS = ROOT / "tests" / "engine"
TOOLS_PYTHON = ROOT / ".venv" / "bin" / "python"

SIZES = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 5,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
CLIENTS = 4
DENSITY = 0.01
MOST_LOST = 0.2


def embedded_s3() -> subprocess.Popen[str]:
    """An S3 server in a process of its own; the environment then leads to it."""
    command = [str(TOOLS_PYTHON), "-m", "dcr_s3.testing.servers", "--bucket", "bench"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    os.environ.update(
        AWS_ENDPOINT_URL_S3=process.stdout.readline().strip(),
        AWS_ACCESS_KEY_ID="local-access-key",
        AWS_SECRET_ACCESS_KEY="local-secret-key",
        AWS_REGION="us-east-1",
    )
    return process


class Load:
    """Clients that ask without a pause, and how many tokens the server has made for them."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model
        self._stop = threading.Event()
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        body = {"model": self._model, "prompt": [1, 5 + number, 9], "max_tokens": 100, "temperature": 0.0}
        data = json.dumps(body | {"ignore_eos": True, "detokenize": False, "return_token_ids": True}).encode()
        headers = {"Content-Type": "application/json"}
        while not self._stop.is_set():
            try:
                with urllib.request.urlopen(
                    urllib.request.Request(self._url + "/v1/completions", data, headers)
                ) as got:
                    got.read()
            except OSError as error:
                self.failures.append(repr(error))
                sleep(0.2)

    def tokens(self) -> float:
        with urllib.request.urlopen(self._url + "/metrics") as reply:
            lines = reply.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:generation_tokens_total"))

    def rate(self, window_s: float, meanwhile: Callable[[float], None]) -> float:
        """Tokens a second while ``meanwhile`` keeps on until the moment it is given."""
        begun, before = monotonic(), self.tokens()
        meanwhile(begun + window_s)
        sleep(max(0.0, begun + window_s - monotonic()))
        return (self.tokens() - before) / (monotonic() - begun)

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def measure(window_s: float, windows: int) -> dict[str, Any]:
    sys.path.insert(0, str(ENGINE_TESTS))
    os.environ["PYTHONPATH"] = str(ENGINE_TESTS)
    import models
    import server

    from dcr_s3 import Sender
    from dcr_s3.resident import ResidentReceiver
    from dcr_s3.vllm.channels import HttpRanks

    storage = embedded_s3()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        state = models.make_model("llama", base, **SIZES)
        with Sender.open("s3://bench/run", base=state, context=False, workers=1) as sender:
            process, url = server.serve(base, Path(folder) / "server.log")
            try:
                ranks = HttpRanks(url)
                receiver = ResidentReceiver("s3://bench/run", ranks, str(base), gate=ranks)
                receiver.pull()
                changed = {name: changed_cells(tensor) for name, tensor in state.items()}
                published = sender.publish(changed)
                result = alternate(Load(url, str(base)), ranks, sender.position.version, window_s, windows)
                (report,) = receiver.pull()
            finally:
                server.stop(process)
                storage.terminate()
    size_bytes = sum(t.nbytes for t in state.values())
    shown = {"size_bytes": size_bytes, "changed": published.changed_elements, "wire_bytes": published.wire_bytes}
    return {**shown, **result, "pause_s": report.pause_s, "limit": MOST_LOST}


def changed_cells(tensor: Any) -> Any:
    """A copy with the lowest bit of some elements flipped."""
    import torch

    chosen = torch.rand(tensor.shape) < DENSITY
    return (tensor.view(torch.int16) ^ chosen.to(torch.int16)).view(torch.bfloat16)


def alternate(load: Load, ranks: Any, version: int, window_s: float, windows: int) -> dict[str, Any]:
    """Windows without and with staging, in turn."""
    stage_s: list[float] = []

    def stage(until: float) -> None:
        while monotonic() < until:
            ranks.call("stage", "delta", version, False, False)
            (status,) = ranks.call("status")
            while status["busy"]:
                sleep(0.25)
                (status,) = ranks.call("status")
            if status["staged"] != version:
                raise RuntimeError(status["error"])
            stage_s.append(status["stage_s"])

    rates: dict[str, list[float]] = {"without": [], "with": []}
    try:
        load.rate(3 * window_s, lambda until: None)
        for _ in range(windows):
            rates["without"].append(load.rate(window_s, lambda until: None))
            rates["with"].append(load.rate(window_s, stage))
    finally:
        load.close()
    if load.failures:
        raise RuntimeError(f"requests failed: {load.failures}")
    lost = 1 - sum(rates["with"]) / sum(rates["without"])
    return {"tokens_per_s": rates, "stage_s": stage_s, "lost": lost}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--window", type=float, default=3.0, help="seconds")
    parser.add_argument("--windows", type=int, default=12, help="of each kind")
    options = parser.parse_args()
    if Path(sys.prefix).resolve() != ENGINE_PYTHON.parent.parent.resolve():
        os.execv(ENGINE_PYTHON, [str(ENGINE_PYTHON), *sys.argv])
    result = measure(options.window, options.windows)
    if options.json:
        print(json.dumps(result))
        return
    rates = {name: mean(found) for name, found in result["tokens_per_s"].items()}
    print(
        f"{result['size_bytes'] / 1e9:.2f} GB of weights, {result['changed']:,} elements changed, "
        f"{result['wire_bytes'] / 1e6:.1f} MB on the wire, staged {len(result['stage_s'])} times, "
        f"{median(result['stage_s']):.2f} s each; the pause, through the server: {1e3 * result['pause_s']:.0f} ms\n"
        f"{rates['without']:.1f} tokens/s, while staging {rates['with']:.1f}"
    )
    met = "met" if result["lost"] < MOST_LOST else "NOT MET"
    print(f"throughput lost while staging: {result['lost']:.3f} (at most {MOST_LOST}): {met}")


if __name__ == "__main__":
    main()
