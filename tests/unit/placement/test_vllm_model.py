"""What is known of vLLM's models: tensors that layers compute from weights, and keep beside them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dcr_s3.errors import BadInput
from dcr_s3.vllm.model import model_engine


class Attention(torch.nn.Module):
    """Keeps something that it made of its projection's weight, as latent attention does."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(4, 4, bias=False)
        self.kv_cache = torch.zeros(3, 2)
        self.scale = torch.ones(1)
        self._make = make
        self.process_weights_after_loading(torch.float32)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.absorbed = self._make(self.projection.weight.data).to(act_dtype)


def test_views_of_weights_move_with_them() -> None:
    model = torch.nn.Sequential(Attention(lambda weight: weight.t()[:2]))
    assert set(model_engine(model).attributes()) == {"0.kv_cache", "0.scale", "0.absorbed"}


def test_copies_of_weights_would_be_stale_and_are_refused_by_name() -> None:
    model = torch.nn.Sequential(Attention(lambda weight: weight * 2))
    with pytest.raises(BadInput, match=r"engine tensor 0\.absorbed: vLLM computed it from weights"):
        model_engine(model).attributes()
