"""An ``AsyncLLM`` that has no weight transfer configured follows a run by the worker extension while requests run.

Usage: async_engine.py RUN. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
import models
import vllm_env

from dcr_s3 import Sender
from dcr_s3.resident import ResidentReceiver
from dcr_s3.vllm.channels import AsyncRanks, PauseMode

STEPS: list[tuple[PauseMode, str]] = [("wait", "asynchronous"), ("keep", "synchronous"), ("abort", "asynchronous")]


def start(directory: Path) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=str(directory), worker_extension_cls="plain_worker.PlainRankExtension", **vllm_env.OPTIONS
    )
    return AsyncLLM.from_engine_args(arguments)


async def ask(engine: Any, prompt: list[int], name: str, max_tokens: int = 12) -> tuple[list[int], str]:
    """Greedy tokens, and why they ended."""
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False, ignore_eos=True)
    outputs = [o async for o in engine.generate({"prompt_token_ids": prompt}, settings, name)]
    answer = outputs[-1].outputs[0]
    return list(answer.token_ids), str(answer.finish_reason)


async def greedy(engine: Any, name: str) -> list[list[int]]:
    return [(await ask(engine, p, f"{name}-{n}"))[0] for n, p in enumerate(vllm_env.PROMPTS)]


async def follow(run: str, work: Path) -> dict[str, Any]:
    state = models.make_model("llama", work / "base")
    sender = Sender.open(run, base=state, workers=1)
    engine = start(work / "base")
    result: dict[str, Any] = {"versions": []}
    for seed, (pause_mode, mode) in enumerate(STEPS):
        channel = AsyncRanks(engine, pause_mode=pause_mode)
        receiver = ResidentReceiver(run, channel, str(work / "base"), gate=channel, mode=mode, verify="full")
        await asyncio.to_thread(receiver.pull)
        before = await greedy(engine, f"before-{seed}")
        state = models.next_version(state, seed, share=0.2)
        sender.publish(state)
        running = [asyncio.create_task(ask(engine, p, f"{seed}-{n}", 100)) for n, p in enumerate(vllm_env.PROMPTS)]
        await asyncio.sleep(0.05)
        (report,) = await asyncio.to_thread(receiver.pull)
        answers = await asyncio.gather(*running)
        tokens = await greedy(engine, f"after-{seed}")
        result["versions"].append(
            {
                "pause_mode": pause_mode,
                "version": report.version,
                "served": await engine.get_weight_version(),
                "ends": sorted({reason for _, reason in answers}),
                "lengths": [len(t) for t, _ in answers],
                "tokens_moved": tokens != before,
                "paused": await engine.is_paused(),
            }
        )
    sums = await engine.compute_weight_checksums()
    engine.shutdown()
    fresh = start(models.save_version(state, work / "base", work / "dense"))
    result["checksums_agree"] = await fresh.compute_weight_checksums() == sums
    result["tokens_agree"] = await greedy(fresh, "fresh") == tokens
    fresh.shutdown()
    sender.close()
    return result


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(follow(sys.argv[1], Path(folder)))), flush=True)


if __name__ == "__main__":
    main()
