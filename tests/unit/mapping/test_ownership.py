"""Every element has one owner; what cannot have one is refused by name."""

from __future__ import annotations

import pytest

from dcr_s3.errors import BadInput
from dcr_s3.mapping.ownership import Held, assign
from dcr_s3.mapping.part import Part
from dcr_s3.mapping.rows import Rows, stacked
from dcr_s3.mapping.view import View


def rows(first: int, count: int, *, total: int = 8, dtype: str = "BF16") -> list[Held]:
    return [Held("w", dtype, part) for part in stacked([Rows("w", (total, 4), first, count)])]


def test_replicas_share_the_bytes_evenly_and_always_in_the_same_way() -> None:
    def layout() -> list[Held]:
        return [
            Held(f"t{n}", "BF16", Part(f"t{n}", (rows_, 64), View.of((rows_, 64)), View.of((rows_, 64))))
            for n, rows_ in enumerate((4096, 7, 512, 512, 1, 33))
        ]

    ranks = [layout() for _ in range(4)]
    pieces = assign(ranks)
    loads = [sum(p.size_bytes for p in pieces if p.owner == rank) for rank in range(4)]
    assert sum(loads) == sum(p.part.there.numel * 2 for p in layout())
    assert max(loads) <= 1.1 * sum(loads) / 4
    assert assign([layout() for _ in range(4)]) == pieces


def test_what_one_rank_alone_holds_is_its_own_and_the_others_take_the_rest() -> None:
    shared = Held("s", "BF16", Part("s", (64, 64), View.of((64, 64)), View.of((64, 64))))
    pieces = assign([[*rows(0, 8), shared], [shared]])
    assert {p.owner for p in pieces if p.name == "w"} == {0}
    loads = [sum(p.size_bytes for p in pieces if p.owner == rank) for rank in range(2)]
    assert abs(loads[0] - loads[1]) <= 4096


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([rows(0, 3), rows(4, 4)], r"tensor w: element 12 of \[8, 4\] is held by no rank"),
        ([rows(0, 4), rows(4, 3)], r"tensor w: element 28 of \[8, 4\] is held by no rank"),
        ([rows(0, 5), rows(4, 4)], r"tensor w: element 16 of .* overlap without being the same \(ranks 0, 1\)"),
        ([rows(0, 8), rows(2, 2)], r"tensor w: element 8 of .* overlap without being the same \(ranks 0, 1\)"),
        ([rows(0, 4), rows(4, 4, dtype="F32")], r"tensor w: is F32 \[8, 4\] on rank 1, BF16 \[8, 4\] on another rank"),
        ([rows(0, 4), rows(4, 4, total=9)], r"tensor w: is BF16 \[9, 4\] on rank 1, BF16 \[8, 4\] on another rank"),
    ],
)
def test_gaps_overlaps_and_contradictions_are_refused_by_name(ranks: list[list[Held]], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        assign(ranks)


def test_a_part_must_be_the_same_box_on_both_sides() -> None:
    with pytest.raises(BadInput, match=r"tensor w: a part is \[2\] there and \[3\] here"):
        Part("w", (8,), View.of((2,)), View.of((3,)))
    with pytest.raises(BadInput, match="tensor w: a part reaches outside"):
        Part("w", (8,), View(7, (2,), (1,)), View.of((2,)))
