"""A vLLM server with requests running throughout follows a run by `dcr-s3 follow --vllm`.

Usage: server.py RUN. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import models
import vllm_env

from dcr_s3 import Sender

DCR = str(Path(sys.executable).with_name("dcr-s3"))
VERSIONS = 3
START_S = 240.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        text = reply.read()
    return json.loads(text) if text else None


def serve(directory: Path, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    port = free_port()
    options = ["--skip-tokenizer-init", "--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "128"]
    options += ["--max-num-seqs", "4", "--max-num-batched-tokens", "128", "--num-gpu-blocks-override", "64"]
    options += ["--worker-extension-cls", "plain_worker.PlainRankExtension"]
    options += ["--weight-transfer-config", json.dumps({"backend": "dcr_s3"})]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory)]
    command += ["--host", "127.0.0.1", "--port", str(port), *options]
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    begun = monotonic()
    while True:
        try:
            ask(url + "/weight_info")
            return process, url
        except OSError:
            if process.poll() is not None or monotonic() - begun > START_S:
                process.kill()
                raise RuntimeError(log.read_text()[-3000:]) from None
            sleep(0.5)


def complete(url: str, model: str) -> list[list[int]]:
    """Greedy tokens for every prompt."""
    answers = []
    for prompt in vllm_env.PROMPTS:
        body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
        reply = ask(url + "/v1/completions", {**body, "return_token_ids": True, "detokenize": False})
        answers.append(reply["choices"][0]["token_ids"])
    return answers


class Clients(threading.Thread):
    """Asks the same questions over and over; keeps every answer and every failure."""

    def __init__(self, url: str, model: str) -> None:
        super().__init__(daemon=True)
        self.answers: list[tuple[str, list[list[int]], str]] = []
        self.failures: list[str] = []
        self.stop = threading.Event()
        self._url, self._model = url, model

    def run(self) -> None:
        while not self.stop.is_set():
            try:
                for number, prompt in enumerate(vllm_env.PROMPTS):
                    before = ask(self._url + "/weight_info")["weight_version"]
                    body = {"model": self._model, "prompt": prompt, "max_tokens": 12, "temperature": 0.0}
                    body |= {"ignore_eos": True, "return_token_ids": True, "detokenize": False}
                    tokens = ask(self._url + "/v1/completions", body)["choices"][0]["token_ids"]
                    after = ask(self._url + "/weight_info")["weight_version"]
                    self.answers.append((before, [[number], tokens], after))
            except Exception as error:
                self.failures.append(repr(error))
                sleep(0.2)


def follow(sender: Sender, state: models.State, url: str, model: str, work: Path, run: str) -> dict[str, Any]:
    """Publishes versions while a follower brings them to the server and clients ask it questions."""
    last = sender.position.version + VERSIONS
    command = [DCR, "follow", run, "--vllm", url, "--base", model, "--json"]
    command += ["--until-version", str(last), "--poll-interval", "0.2"]
    with (work / "follow.log").open("wb") as errors:
        follower = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
    clients = [Clients(url, model) for _ in range(2)]
    truth: dict[str, list[list[int]]] = {}
    try:
        for version in range(sender.position.version, last + 1):
            begun = monotonic()
            while ask(url + "/weight_info")["weight_version"] != str(version):
                if follower.poll() not in (None, 0) or monotonic() - begun > 120:
                    raise RuntimeError((work / "follow.log").read_text()[-3000:])
                sleep(0.05)
            truth[str(version)] = complete(url, model)
            for client in clients:
                if not client.is_alive():
                    client.start()
            sleep(1.5)
            if version < last:
                state.update(models.next_version(state, version, share=0.3))
                sender.publish(state)
        output, _ = follower.communicate(timeout=60)
    finally:
        for client in clients:
            client.stop.set()
        stop(follower)
    for client in clients:
        client.join()
    return {
        "followed": json.loads(output),
        "follower_code": follower.returncode,
        "answers": sum(len(c.answers) for c in clients),
        "failures": [f for c in clients for f in c.failures],
        "wrong": list(wrong_answers(clients, truth)),
        "versions_differ": len({json.dumps(t) for t in truth.values()}) == len(truth),
        "truth": truth[str(last)],
    }


def wrong_answers(clients: list[Clients], truth: dict[str, list[list[int]]]) -> Iterator[dict[str, Any]]:
    """Answers that are not exactly those of one version that was served meanwhile."""
    for before, ((number,), tokens), after in (answer for client in clients for answer in client.answers):
        possible = [v for v in truth if int(before) <= int(v) <= int(after)]
        if all(truth[v][number] != tokens for v in possible):
            yield {"before": before, "after": after, "prompt": number}


def compare(url: str, model: str, state: models.State, work: Path, truth: list[list[int]]) -> dict[str, Any]:
    """The server against a fresh one that was started from the dense checkpoint."""
    dense = work / "dense"
    process, other = serve(models.save_version(state, Path(model), dense), work / "dense.log")
    try:
        sums = [ask(u + "/weight_checker", {"action": "checksum"})["checksums"] for u in (url, other)]
        return {
            "tokens_agree": complete(other, str(dense)) == truth,
            "checksums_agree": sums[0] == sums[1] and len(sums[0]) > 10,
        }
    finally:
        stop(process)


def main() -> None:
    (run,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        state = models.make_model("llama", work / "base")
        sender = Sender.open(run, base=state, context=False, workers=1)
        model = str(work / "base")
        process, url = serve(work / "base", work / "server.log")
        try:
            result = follow(sender, state, url, model, work, run)
            result["version"] = ask(url + "/weight_info")["weight_version"]
            result["paused"] = ask(url + "/is_paused")["is_paused"]
            verify = [DCR, "resident", run, "--vllm", url, "--json"]
            proof = subprocess.run(verify, capture_output=True, check=False, timeout=60)
            result["proof"] = json.loads(proof.stdout or b"null")
            explain = [DCR, "bind", run, "--vllm", url, "--explain", "--json"]
            bound = subprocess.run(explain, capture_output=True, check=False, timeout=60)
            result["bound"] = json.loads(bound.stdout or b"null")
            result.update(compare(url, model, state, work, result.pop("truth")))
        finally:
            stop(process)
            sender.close()
    print(json.dumps(result), flush=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


if __name__ == "__main__":
    main()
