"""Settings under which vLLM runs on a small CPU machine; imported before vllm."""

from __future__ import annotations

import os
from typing import Any

os.environ.update(
    {
        "VLLM_ENABLE_V1_MULTIPROCESSING": os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_SGL_KERNEL": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
)

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "bfloat16",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "disable_log_stats": True,
    "num_gpu_blocks_override": 64,
}
PROMPTS = [[1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45, 49, 53, 57, 61, 65], [1, 7, 11], [1, 100, 200, 30, 40]]


def plain_kernels() -> None:
    """Keeps weights in their own layout where this machine's kernels would drop them."""
    import vllm._custom_ops

    vllm._custom_ops._supports_onednn = False


def greedy(llm: Any) -> list[list[int]]:
    """Tokens that an engine generates for a few prompts."""
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0.0, max_tokens=12, detokenize=False, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], settings, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]
