"""Engines of several ranks in this process, and runs for them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from dcr_s3 import Sender
from dcr_s3.rank import Rank, answer, results
from dcr_s3.store.memory import MemoryStore
from dcr_s3.targets.engine.bound import Engine
from dcr_s3.targets.storages import attribute_tensors, module_tensors

sys.path.insert(0, str(Path(__file__).parent))
import toys


def engine_of(toy: toys.Toy) -> Engine:
    return Engine(toy.load_weights, lambda: module_tensors(toy), lambda: attribute_tensors(toy))


class Group:
    """Several ranks in this process, reached as over an engine's channel."""

    def __init__(self, *toys_of_ranks: toys.Toy) -> None:
        self.ranks = [Rank(engine_of(toy), index=i) for i, toy in enumerate(toys_of_ranks)]
        self.served: list[int] = []
        self.fails: dict[tuple[int, str], BaseException] = {}

    def call(self, method: str, *arguments: Any) -> list[Any]:
        answers = []
        for index, rank in enumerate(self.ranks):
            error = self.fails.get((index, method))
            if isinstance(error, Exception):
                answers.append({"error": str(error), "error_kind": type(error).__name__})
            elif error is not None:
                raise error
            else:
                answers.append(answer(rank, method, list(arguments)))
        return results(answers)

    def serving(self, version: int) -> None:
        self.served.append(version)


def published(kind: type[toys.Toy], store: MemoryStore, directory: Path, *, context: bool) -> tuple[toys.State, Sender]:
    """A run whose version 0 is a checkpoint directory."""
    state = toys.random_state(kind)
    directory.mkdir()
    save_file(state, directory / "model.safetensors")
    return state, Sender.open(store, base=state, context=context, workers=0)


def loaded(toy: toys.Toy, state: toys.State) -> toys.Toy:
    toy.load_weights(state.items())
    return toy
