"""A vLLM engine in this process (``LLM`` without its own process for the core) as a target."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dcr_s3.errors import BadInput
from dcr_s3.targets.engine.apply import NoGate, Verify
from dcr_s3.targets.engine.target import EngineTarget
from dcr_s3.vllm.model import model_engine


class LocalVllmTarget(EngineTarget):
    """``LLM`` whose model lives in this process: one rank, ``VLLM_ENABLE_V1_MULTIPROCESSING=0``.

    It generates only while its methods are called, so nothing has to be kept out while a receiver pulls; prefix caches
    are reset with every version. Raises ``BadInput`` for an engine whose model is elsewhere.
    """

    def __init__(
        self, llm: Any, *, verify: Verify = "written", pause_limit_s: float = 30.0, unwritten: Iterable[str] = ()
    ) -> None:
        try:
            model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
        except AttributeError as error:
            raise BadInput(
                f"this LLM does not keep its model in this process ({error}): set VLLM_ENABLE_V1_MULTIPROCESSING=0 "
                "and use one rank, or let `dcr-s3 follow --vllm` drive a server"
            ) from None
        engine = model_engine(model)
        super().__init__(engine, gate=_Caches(llm), verify=verify, pause_limit_s=pause_limit_s, unwritten=unwritten)


class _Caches(NoGate):
    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def reset_caches(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise BadInput("vLLM did not reset its prefix cache: requests are still running")
