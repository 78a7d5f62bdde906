"""Two workers follow a run: what they hold equals two workers of a fresh engine, and each fetches about half.

Usage: tensor_parallel.py RUN. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import models
import torch
import vllm_env

from dcr_s3 import Sender
from dcr_s3.errors import StateMismatch
from dcr_s3.resident import ResidentReceiver
from dcr_s3.vllm.channels import LlmRanks

SIZES = {
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
}
OPTIONS: dict[str, Any] = {
    **vllm_env.OPTIONS,
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "worker_extension_cls": "plain_worker.PlainRankExtension",
    "weight_transfer_config": {"backend": "dcr_s3"},
}


def checksums(llm: Any) -> list[dict[str, str]]:
    return llm.collective_rpc("compute_weight_checksums")


def main() -> None:
    from vllm import LLM

    (run,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        state = models.make_model("llama", work / "base", **SIZES)
        sender = Sender.open(run, base=state, context=False, workers=1, parts=2)
        llm = LLM(model=str(work / "base"), **OPTIONS)
        channel = LlmRanks(llm)
        receiver = ResidentReceiver(run, channel, str(work / "base"), gate=channel, verify="full")
        receiver.open()
        result: dict[str, Any] = {"routes": receiver.routes, "versions": []}
        receiver.pull()
        for seed in range(2):
            before = vllm_env.greedy(llm)
            state = models.next_version(state, seed, share=0.1)
            published = sender.publish(state)
            (report,) = receiver.pull()
            tokens = vllm_env.greedy(llm)
            result["versions"].append(
                {
                    "version": report.version,
                    "served": llm.get_weight_version(),
                    "pause_s": report.pause_s,
                    "shares": [wire / published.wire_bytes for wire in report.rank_wire_bytes],
                    "tokens_moved": tokens != before,
                    "tokens": tokens,
                    "checksums": checksums(llm),
                }
            )
        receiver.verify()
        llm.collective_rpc("reset_weights")
        try:
            receiver.verify()
            result["planted"] = "missed"
        except StateMismatch as error:
            result["planted"] = str(error)
        sender.close()
        del channel, receiver, llm
        fresh = LLM(model=str(models.save_version(state, work / "base", work / "dense")), **OPTIONS)
        last = result["versions"][-1]
        result["checksums_agree"] = checksums(fresh) == last["checksums"]
        result["tokens_agree"] = vllm_env.greedy(fresh) == last["tokens"]
        for version in result["versions"]:
            del version["checksums"], version["tokens"]
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
