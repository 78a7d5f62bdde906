"""The rule for a multipart upload's part numbers, the same in every store."""

from __future__ import annotations

from typing import TypeVar

from dcr_s3.errors import BadInput

T = TypeVar("T")


def ordered_parts(key: str, parts: dict[int, T]) -> list[T]:
    """Parts by number. Raises BadInput unless they are numbered 1..n without a gap, n at least 1."""
    numbers = sorted(parts)
    if not numbers or numbers != list(range(1, len(numbers) + 1)):
        raise BadInput(f"parts of {key} must be numbered 1..n without a gap, got {numbers[:8]}")
    return [parts[number] for number in numbers]
