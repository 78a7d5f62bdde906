"""One vLLM worker's rank. ``RankExtension`` is given to vLLM as ``worker_extension_cls``."""

from __future__ import annotations

import json
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dcr_s3.rank import Rank, answer
from dcr_s3.vllm.model import model_engine

_ranks: WeakKeyDictionary[torch.nn.Module, Rank] = WeakKeyDictionary()


def rank_of(model: torch.nn.Module, index: int) -> Rank:
    """The rank that a worker's model is; the same for the same model. ``index`` counts the engine's workers."""
    if model not in _ranks:
        _ranks[model] = Rank(model_engine(model), index=index)
    return _ranks[model]


class RankExtension:
    """Methods that vLLM adds to its workers, callable by ``collective_rpc``."""

    model_runner: Any
    rank: int

    def dcr_s3(self, method: str, arguments: str) -> dict[str, Any]:
        """Calls a method of this worker's :class:`Rank`. ``arguments`` is a JSON list, the answer what JSON can say."""
        return answer(rank_of(self.model_runner.get_model(), self.rank), method, json.loads(arguments))
