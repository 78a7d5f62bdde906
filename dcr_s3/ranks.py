"""All ranks of an engine, as one is reached from outside or as the only one here."""

from __future__ import annotations

from typing import Any, Protocol

from dcr_s3.rank import Rank
from dcr_s3.targets.engine.bound import Engine


class Ranks(Protocol):
    """A channel to all ranks of an engine."""

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of every rank's :class:`Rank` and returns their results in the order of ranks.

        Raises ``DcrError`` if any of them failed.
        """

    def serving(self, version: int) -> None:
        """Tells the engine which version it serves from now on. Called while it is paused."""


class LocalRank:
    """An engine in this process, as its only rank."""

    def __init__(self, engine: Engine | Rank) -> None:
        self.rank = engine if isinstance(engine, Rank) else Rank(engine)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """As :meth:`Ranks.call`."""
        return [getattr(self.rank, method)(*arguments)]

    def serving(self, version: int) -> None:
        """Nobody to tell."""
