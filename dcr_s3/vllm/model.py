"""A vLLM model as an engine: its own loader, and what vLLM does to weights after loading them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dcr_s3.errors import BadInput
from dcr_s3.targets.engine.bound import Engine
from dcr_s3.targets.module import loader_of
from dcr_s3.targets.storages import attribute_tensors, module_tensors, storage_key

_CACHE = "kv_cache"
"""What vLLM calls a layer's cache, which no weights are in."""


def model_engine(model: torch.nn.Module) -> Engine:
    """The engine for one rank's model."""
    return Engine(
        loader_of(model),
        lambda: module_tensors(model),
        lambda: _attributes(model),
        after_loading=lambda names: _after_loading(model, names),
        companions=lambda name: _companions(model, name),
    )


def _attributes(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors kept as plain attributes.

    Raises ``BadInput`` naming a matrix that a layer has computed from its parts' weights and keeps beside them: updates
    would leave it stale. Views of weights move with them.
    """
    registered = {storage_key(t) for t in module_tensors(model).values()}
    found = attribute_tensors(model)
    for name, tensor in found.items():
        layer, key = _owner(model, name), name.rpartition(".")[2]
        derives = callable(getattr(layer, "process_weights_after_loading", None)) and any(
            True for _ in layer.parameters()
        )
        if derives and key != _CACHE and tensor.dim() > 1 and storage_key(tensor) not in registered:
            raise BadInput(
                f"engine tensor {name}: vLLM computed it from weights after loading them, so updates would not reach "
                "it; load this engine anew for every version"
            )
    return found


def _owner(model: torch.nn.Module, name: str) -> torch.nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _companions(model: torch.nn.Module, name: str) -> list[str]:
    """Tensors that vLLM processes together with one: those of the same layer, if the layer has a method for that."""
    prefix = name.rpartition(".")[0]
    layer = _owner(model, name)
    if not hasattr(layer, "quant_method"):
        return [name]
    own = [*layer._parameters, *layer._buffers]
    return [f"{prefix}.{key}" if prefix else key for key in own]


def _after_loading(model: torch.nn.Module, names: Iterable[str]) -> None:
    """Runs the post-processing of the layers that own these tensors, and keeps parameters where they are."""
    layers: dict[str, torch.nn.Module] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0], _owner(model, name))
    for prefix, layer in layers.items():
        method: Any = getattr(layer, "quant_method", None)
        if method is None:
            continue
        kept = dict(layer._parameters)
        kernel = getattr(method, "moe_kernel", None)
        method.process_weights_after_loading(layer)
        if kernel is not None:  # on a second pass vLLM leaves out the kernel's own packing
            kernel.fused_experts.process_weights_after_loading(layer)
        for key, old in kept.items():
            new = layer._parameters.get(key)
            if new is not old and old is not None:
                if new is None or new.shape != old.shape or new.dtype != old.dtype:
                    raise BadInput(f"engine tensor {prefix}.{key}: vLLM gives it another shape after loading")
                old.data.copy_(new.data)
                layer._parameters[key] = old
