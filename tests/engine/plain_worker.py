"""The worker extension, for workers that keep weights in their own layout whatever kernels this machine has."""

from __future__ import annotations

import vllm_env

from dcr_s3.vllm.worker import RankExtension

vllm_env.plain_kernels()


class PlainRankExtension(RankExtension):
    """Imported by a worker before it makes its model."""
