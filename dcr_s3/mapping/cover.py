"""Proves that boxes are disjoint and cover a tensor, exactly, from their contiguous runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dcr_s3.mapping.view import View, element_set

Runs = tuple[npt.NDArray[np.int64], int]


def runs(view: View) -> Runs:
    """Starts (int64, ascending) and common length of the contiguous runs that make up a view's elements."""
    box = element_set(view)
    outer, length = (box.shape, 1) if box.strides[-1] != 1 else (box.shape[:-1], box.shape[-1])
    starts = np.array([box.start], np.int64)
    for extent, stride in zip(outer, box.strides, strict=False):
        starts = (starts[:, None] + np.arange(extent, dtype=np.int64) * stride).reshape(-1)
    return starts, length


def first_fault(boxes: Sequence[View], elements: int) -> tuple[str, int] | None:
    """``("missing", i)`` or ``("twice", i)`` for the first element of a tensor that is not covered exactly once; None
    if all are. ``boxes`` may come in any order.
    """
    filled = [runs(b) for b in boxes if b.numel]
    if not filled:
        return ("missing", 0) if elements else None
    begin = np.concatenate([starts for starts, _ in filled])
    end = np.concatenate([starts + length for starts, length in filled])
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], end[order]
    expected = np.concatenate([np.zeros(1, np.int64), np.maximum.accumulate(end)])
    wrong = np.flatnonzero(np.append(begin, elements) != expected)
    if not wrong.size:
        return None
    at = int(wrong[0])
    here = int(begin[at]) if at < begin.size else elements
    return ("missing", int(expected[at])) if here > expected[at] else ("twice", here)
