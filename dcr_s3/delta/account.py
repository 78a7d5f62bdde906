"""What a block's changes do to the state digest, tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcr_s3.delta.changes import Changes
from dcr_s3.delta.digest import TensorKey, digest_at
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.region import Region, split_positions


@dataclass(frozen=True)
class TensorChange:
    """Digest terms that leave (``old``) and enter (``new``) tensor number ``tensor``."""

    tensor: int
    old: StateDigest
    new: StateDigest


def account(regions: Sequence[Region], changes: Changes, keys: Sequence[TensorKey]) -> list[TensorChange]:
    """The terms of every region with changes. ``keys`` are by tensor number."""
    result = []
    for region, span, first in split_positions(regions, changes.positions):
        index = region.canonical(changes.positions[span] - np.uint32(first))
        key = keys[region.tensor]
        result.append(
            TensorChange(
                region.tensor, digest_at(key, index, changes.old[span]), digest_at(key, index, changes.new[span])
            )
        )
    return result


def totals(changes: Sequence[TensorChange]) -> tuple[StateDigest, StateDigest]:
    """Sums of ``old`` and of ``new``."""
    old, new = StateDigest(), StateDigest()
    for change in changes:
        old, new = old + change.old, new + change.new
    return old, new
