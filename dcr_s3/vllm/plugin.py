"""What vLLM calls when it loads its plug-ins: makes the weight-transfer backend ``dcr_s3`` known."""

from __future__ import annotations

BACKEND = "dcr_s3"


def register() -> None:
    """Registers the backend; vLLM may call this several times in one process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(BACKEND, "dcr_s3.vllm.backend", "DcrWeightTransferEngine")
    except ValueError:
        return  # it is registered already
