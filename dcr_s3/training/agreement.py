"""Replicas must hold the same bits: ranks that share pieces compare digests of some of them, or of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from dcr_s3.delta import digest_range, tensor_key
from dcr_s3.errors import StateMismatch
from dcr_s3.format.dtypes import DTYPES
from dcr_s3.mapping.group import Group
from dcr_s3.mapping.ownership import Piece
from dcr_s3.mapping.read import Reader
from dcr_s3.training.plan import Plan

Replicas = Literal["sampled", "full", "off"]

SAMPLE_BYTES = 16 << 20


class Agreement:
    """Compares shared pieces: all, or for each version other ones, of at most ``SAMPLE_BYTES`` per rank."""

    def __init__(self, plan: Plan, group: Group, replicas: Replicas) -> None:
        self._plan = plan
        self._group = group
        self._replicas = replicas
        self._shared = [n for n, piece in enumerate(plan.pieces) if len(piece.sides) > 1]

    def digests(self, reader: Reader, turn: int) -> dict[str, str]:
        """Of this rank's side of the pieces that are compared at ``turn``, by piece; not of what was not rebuilt."""
        sides = {n: self._plan.pieces[n].sides.get(self._group.rank) for n in self._chosen(turn)}
        return {
            str(n): self._digest(self._plan.pieces[n], reader)
            for n, side in sides.items()
            if side is not None and side.key in reader
        }

    def compare(self, answers: Sequence[Mapping[str, str]], turn: int) -> None:
        """Compares what all ranks have said. Raises ``StateMismatch`` naming a tensor and the ranks that differ."""
        for number in self._chosen(turn):
            piece = self._plan.pieces[number]
            expected = answers[piece.owner].get(str(number))
            differing = [rank for rank in piece.sides if answers[rank].get(str(number)) != expected]
            if differing:
                raise StateMismatch(
                    f"tensor {piece.name}: replicas on rank {', '.join(map(str, differing))} hold other bits than "
                    f"on rank {piece.owner}; nothing was published, find out where training diverged"
                )

    def _chosen(self, turn: int) -> Sequence[int]:
        if self._replicas == "off":
            return ()
        if self._replicas == "full":
            return self._shared
        chosen: list[int] = []
        size_bytes = 0
        for step in range(len(self._shared)):
            number = self._shared[(turn * 7919 + step) % len(self._shared)]
            size_bytes += self._plan.pieces[number].size_bytes
            if chosen and size_bytes > SAMPLE_BYTES:
                break
            chosen.append(number)
        return chosen

    def _digest(self, piece: Piece, reader: Reader) -> str:
        key = tensor_key(piece.name, DTYPES[piece.dtype], piece.there.shape)
        return digest_range(key, 0, self._plan.read(piece, reader)).hex()
