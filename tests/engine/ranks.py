"""Two workers follow a run: what they hold equals two workers of a fresh engine, and each fetches about half.

Usage: ranks.py RUN tensor|pipeline. Prints one JSON object. Workers in a pipeline generate nothing: vLLM's scheduler
fails on the first answer of a pipeline on CPU, whatever its weights.
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

from dcr_s3 import Receiver, Sender
from dcr_s3.errors import StateMismatch
from dcr_s3.resident import ResidentReceiver
from dcr_s3.store import open_store
from dcr_s3.upkeep import make_snapshot
from dcr_s3.vllm.channels import LlmRanks

SIZES = {
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
}


def options(kind: str) -> dict[str, Any]:
    return {
        **vllm_env.OPTIONS,
        f"{kind}_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "worker_extension_cls": "plain_worker.PlainRankExtension",
        "weight_transfer_config": {"backend": "dcr_s3"},
    }


def greedy(llm: Any, kind: str) -> list[list[int]]:
    return vllm_env.greedy(llm) if kind == "tensor" else []


def checksums(llm: Any) -> list[dict[str, str]]:
    return llm.collective_rpc("compute_weight_checksums")


def follow(run: str, kind: str, work: Path) -> dict[str, Any]:
    from vllm import LLM

    state = models.make_model("llama", work / "base", **SIZES)
    sender = Sender.open(run, base=state, context=kind == "pipeline", workers=1, parts=2 if kind == "tensor" else 1)
    llm = LLM(model=str(work / "base"), **options(kind))
    channel = LlmRanks(llm)
    receiver = ResidentReceiver(run, channel, str(work / "base"), gate=channel, verify="full", name="engine")
    receiver.open()
    result: dict[str, Any] = {"routes": receiver.routes, "versions": []}
    receiver.pull()
    for seed in range(3):
        before = greedy(llm, kind)
        state = models.next_version(state, seed, share=0.1)
        published = sender.publish(state)
        if seed == 2:
            leave_a_snapshot_alone(run, work, published.version)
        (report,) = receiver.pull()
        tokens = greedy(llm, kind)
        result["versions"].append(
            {
                "version": report.version,
                "kind": report.kind,
                "served": llm.get_weight_version(),
                "acknowledged": sender.wait_for(report.version, ["engine"], timeout_s=0),
                "shares": [wire / published.wire_bytes for wire in report.rank_wire_bytes],
                "tokens_moved": tokens != before,
            }
        )
    result["tokens"], result["checksums"] = tokens, checksums(llm)
    receiver.verify()
    llm.collective_rpc("reset_weights")
    try:
        receiver.verify()
        result["planted"] = "missed"
    except StateMismatch as error:
        result["planted"] = str(error)
    sender.close()
    models.save_version(state, work / "base", work / "dense")
    return result


def leave_a_snapshot_alone(run: str, work: Path, version: int) -> None:
    """Deletes a version's delta after making a snapshot of it, so that there is no other way to it."""
    Receiver(run, work / "mirror", base=work / "base", acknowledge=False, workers=1).pull()
    make_snapshot(run, work / "mirror", workers=1)
    store = open_store(run)
    store.delete([o.key for o in store.list(f"segments/{version:012d}/")])


def main() -> None:
    run, kind = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        result = follow(run, kind, Path(folder))
        from vllm import LLM

        fresh = LLM(model=str(Path(folder) / "dense"), **options(kind))
        result["checksums_agree"] = checksums(fresh) == result.pop("checksums")
        result["tokens_agree"] = greedy(fresh, kind) == result.pop("tokens")
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
