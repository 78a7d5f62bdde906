"""A torch module as a target, through its own ``load_weights`` or through ``load_state_dict``."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dcr_s3.errors import BadInput
from dcr_s3.targets.engine.apply import Gate, Verify
from dcr_s3.targets.engine.bound import Engine
from dcr_s3.targets.engine.target import EngineTarget
from dcr_s3.targets.placement_trace import LoadWeights
from dcr_s3.targets.storages import attribute_tensors, module_tensors


class ModuleTarget(EngineTarget):
    """A module that a receiver keeps at the run's newest version, such as an evaluation worker's model.

    ``gate`` keeps computations out during an update; without one, do not use the module while a receiver pulls.
    Further options as for :class:`EngineTarget`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        gate: Gate | None = None,
        verify: Verify = "written",
        pause_limit_s: float = 30.0,
        unwritten: Iterable[str] = (),
    ) -> None:
        engine = Engine(loader_of(module), lambda: module_tensors(module), lambda: attribute_tensors(module))
        super().__init__(engine, gate=gate, verify=verify, pause_limit_s=pause_limit_s, unwritten=unwritten)


def loader_of(module: torch.nn.Module) -> LoadWeights:
    """The module's own ``load_weights`` if it has one, else ``load_state_dict``."""
    own = getattr(module, "load_weights", None)
    return own if callable(own) else state_dict_loader(module)


def state_dict_loader(module: torch.nn.Module) -> LoadWeights:
    """``load_state_dict`` as a loader of (name, tensor) pairs; some of the module's tensors may be left out.

    It raises ``BadInput`` naming a tensor that the module does not have.
    """

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        outcome = module.load_state_dict(dict(weights), strict=False)
        if outcome.unexpected_keys:
            raise BadInput(f"tensor {outcome.unexpected_keys[0]}: the module has no parameter or buffer of this name")

    return load_weights
