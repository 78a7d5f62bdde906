"""Residual conversion: canonical tensors that are computed from training tensors rather than cut out of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dcr_s3.delta import digest_range, tensor_key
from dcr_s3.errors import BadInput
from dcr_s3.format.digest import StateDigest
from dcr_s3.mapping.cells import describe_tensor, flat_cells
from dcr_s3.mapping.part import Shard
from dcr_s3.mapping.placements import local_part

_CONVERTED = "converted:"

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Residual:
    """One rule: ``convert`` computes the canonical tensors ``outputs`` whenever a bit of ``inputs`` changes anywhere.

    ``inputs`` are names of training tensors or of other rules' outputs; None if they are not known, then it runs for
    every version. ``convert`` is given the inputs by name (all training tensors, where they are not known) and returns
    every output. It runs on all ranks together, so it may use collectives of the training job. An output is a tensor
    that this rank holds whole, a DTensor, or a ``Shard`` that says which part of it this rank has. All outputs of one
    rule are rebuilt together and committed in one version: a matrix and its scales never part.
    """

    outputs: tuple[str, ...]
    inputs: tuple[str, ...] | None
    convert: Callable[[Tensors], Mapping[str, torch.Tensor | Shard]]

    def shards(self, tensors: Tensors) -> list[Shard]:
        """The outputs as this rank holds them. Raises ``BadInput`` for inputs or outputs that are missing."""
        missing = [name for name in self.inputs or () if name not in tensors]
        if missing:
            raise BadInput(f"tensor {missing[0]}: the conversion to {self.outputs[0]} needs it, but it is not there")
        given = {name: tensors[name] for name in self.inputs} if self.inputs is not None else tensors
        with torch.no_grad():
            made = self.convert(given)
        wrong = sorted(set(made) ^ set(self.outputs))
        if wrong:
            raise BadInput(f"tensor {wrong[0]}: the conversion gave {sorted(made)}, it names {sorted(self.outputs)}")
        return [_as_shard(name, made[name]) for name in self.outputs]


class Residuals:
    """All rules of a publisher, and what their inputs were in the last committed version."""

    def __init__(self, rules: Sequence[Residual]) -> None:
        self.rules = _in_order(rules)
        self._made_by = {output: number for number, rule in enumerate(self.rules) for output in rule.outputs}
        self._committed: list[StateDigest | None] = [None] * len(self.rules)
        self._candidate = list(self._committed)

    def changed(self, tensors: Tensors) -> list[bool]:
        """Per rule, whether this rank's inputs differ from the last committed version's, or cannot be known not to."""
        self._candidate = [_digest(rule, tensors) for rule in self.rules]
        return [a is None or a != b for a, b in zip(self._candidate, self._committed, strict=True)]

    def rebuild(self, flags: Sequence[bool], tensors: Tensors) -> list[Shard]:
        """On all ranks together: the outputs of the flagged rules, and of those that depend on them.

        ``flags`` are combined over all ranks, so that all rebuild the same.
        """
        flagged = list(flags)
        made = dict(tensors)
        rebuilt: list[Shard] = []
        for number, rule in enumerate(self.rules):
            flagged[number] = flagged[number] or any(flagged[n] for n in self._sources(rule))
            if flagged[number]:
                self._supply(rule, made)
                shards = rule.shards(made)
                made |= {name: shard.tensor for name, shard in zip(rule.outputs, shards, strict=True)}
                rebuilt += shards
        return rebuilt

    def commit(self) -> None:
        """What was converted last is what receivers now hold."""
        self._committed = list(self._candidate)

    def _supply(self, rule: Residual, made: dict[str, torch.Tensor]) -> None:
        """Rebuilds what ``rule`` needs of rules that were not flagged themselves."""
        for number in sorted(self._sources(rule)):
            source = self.rules[number]
            if not made.keys() >= set(source.outputs):
                self._supply(source, made)
                made |= {n: s.tensor for n, s in zip(source.outputs, source.shards(made), strict=True)}

    def _sources(self, rule: Residual) -> set[int]:
        return {self._made_by[name] for name in rule.inputs or () if name in self._made_by}


def _digest(rule: Residual, tensors: Tensors) -> StateDigest | None:
    """Of all bits of the inputs that this rank holds; None where the inputs are unknown."""
    if rule.inputs is None:
        return None
    result = StateDigest()
    for name in rule.inputs:
        if name in tensors:
            local, _ = local_part(name, tensors[name])
            if local.numel():
                key = tensor_key(name, *describe_tensor(name, local))
                result += digest_range(key, 0, flat_cells(local.contiguous().reshape(-1)))
    return result


def is_converted(key: str) -> bool:
    """Whether a shard's key is that of a rule's output."""
    return key.startswith(_CONVERTED)


def _as_shard(name: str, made: torch.Tensor | Shard) -> Shard:
    if isinstance(made, Shard):
        return replace(made, key=_CONVERTED + name)
    local, parts = local_part(name, made)
    return Shard(_CONVERTED + name, local, parts, local.dtype)


def _in_order(rules: Sequence[Residual]) -> list[Residual]:
    """Every rule after those whose outputs it needs. Raises ``BadInput`` for a circle or an output made twice."""
    outputs = [name for rule in rules for name in rule.outputs]
    for name in outputs:
        if outputs.count(name) > 1:
            raise BadInput(f"tensor {name}: two conversions make it")
    waiting, ordered, made = list(rules), list[Residual](), set[str]()
    while waiting:
        ready = [r for r in waiting if not (set(r.inputs or ()) & set(outputs)) - made]
        if not ready:
            raise BadInput(f"tensor {waiting[0].outputs[0]}: its conversion depends on itself")
        ordered += ready
        made |= {name for rule in ready for name in rule.outputs}
        waiting = [r for r in waiting if r not in ready]
    return ordered
