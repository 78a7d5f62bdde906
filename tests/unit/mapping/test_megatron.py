"""Megatron's layouts against a conversion written the other way round: build every rank's tensor from the canonical
ones with torch operations, then read the canonical ones back through the parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dcr_s3.errors import BadInput
from dcr_s3.mapping import megatron
from dcr_s3.mapping.megatron import Attention, Axis
from dcr_s3.mapping.ownership import Held, assign
from dcr_s3.mapping.part import Part


def numbered(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel()).reshape(shape)


def rebuild(ranks: Sequence[tuple[torch.Tensor, Sequence[Part]]]) -> dict[str, torch.Tensor]:
    """The canonical tensors, from the pieces that their owners hold; assign() proves that none is missing."""
    pieces = assign([[Held("fused", "I64", part) for part in parts] for _, parts in ranks])
    result = {part.name: torch.full(part.shape, -1) for _, parts in ranks for part in parts}
    for piece in pieces:
        here = piece.sides[piece.owner].here
        local = ranks[piece.owner][0].clone(memory_format=torch.contiguous_format)
        value = local.as_strided(here.shape, here.strides, here.start)
        result[piece.name].as_strided(piece.there.shape, piece.there.strides, piece.there.start).copy_(value)
    return result


def check(ranks: Sequence[tuple[torch.Tensor, Sequence[Part]]], expected: dict[str, torch.Tensor]) -> None:
    found = rebuild(ranks)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def fuse_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int, gate: torch.Tensor | None) -> torch.Tensor:
    """The whole fused matrix: group by group its query heads, gate heads, key and value."""
    sides = [t.chunk(groups) for t in ([q] if gate is None else [q, gate])]
    rows = []
    for group, (key, value) in enumerate(zip(k.chunk(groups), v.chunk(groups), strict=True)):
        rows += [*(side[group] for side in sides), key, value]
    return torch.cat(rows)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", ["none", "own", "inside"])
def test_fused_query_key_value(tp: int, groups: int, bias: bool, gate: str) -> None:
    heads, head, hidden = 8, 16, () if bias else (5,)
    q, k, v, g = (numbered(n * head, *hidden, start=100_000 * i) for i, n in enumerate((heads, groups, groups, heads)))
    fused = fuse_qkv(q, k, v, groups, None if gate == "none" else g)
    name = {"none": None, "own": "g", "inside": "q"}[gate]
    attention = Attention("q", "k", "v", heads, groups, head, hidden, name)
    ranks = [(fused.chunk(tp)[r], megatron.fused_qkv(attention, Axis(r, tp))) for r in range(tp)]
    expected = {"q": q, "k": k, "v": v}
    if gate == "own":
        expected["g"] = g
    if gate == "inside":
        by_head = [t.reshape(heads, head, *hidden) for t in (q, g)]
        expected["q"] = torch.cat(by_head, dim=1).reshape(2 * heads * head, *hidden)
    check(ranks, expected)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("interleave", [None, 1, 2])
def test_gate_and_up(tp: int, interleave: int | None) -> None:
    gate, up = numbered(16, 3), numbered(16, 3, start=1000)
    ranks = []
    for r in range(tp):
        halves = [t.chunk(tp)[r] for t in (gate, up)]
        step = interleave or halves[0].shape[0]
        local = torch.cat([block for pair in zip(*(h.split(step) for h in halves), strict=True) for block in pair])
        ranks.append((local, megatron.gated("gate", "up", gate.shape, Axis(r, tp), interleave=interleave)))
    check(ranks, {"gate": gate, "up": up})


def test_columns_rows_norms_transposes_and_padded_vocabulary() -> None:
    weight = numbered(8, 6)
    for cut, dim in ((megatron.column_parallel, 0), (megatron.row_parallel, 1)):
        check([(weight.chunk(2, dim)[r], cut("w", weight.shape, Axis(r, 2))) for r in range(2)], {"w": weight})
    check([(weight, megatron.replicated("w", weight.shape))] * 3, {"w": weight})
    check([(weight.T.contiguous(), megatron.transposed("w", weight.shape))], {"w": weight})
    table = numbered(13, 3)
    padded = torch.cat([table, torch.full((3, 3), -7)])
    for tp in (1, 2, 4, 8):
        ranks = [
            (padded.chunk(tp)[r], megatron.vocabulary("e", table.shape, Axis(r, tp), padded_rows=16)) for r in range(tp)
        ]
        check(ranks, {"e": table})


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_under_expert_and_expert_tensor_parallelism(stacked: bool) -> None:
    experts, ep, etp = 6, 3, 2
    downs = numbered(experts, 4, 8)
    ranks = []
    for r in range(ep * etp):
        place, cut = Axis(r // etp, ep), Axis(r % etp, etp)
        local, parts = [], []
        for e in range(experts // ep):
            number = megatron.global_expert(e, place, experts)
            own = megatron.row_parallel(f"experts.{number}.down", downs.shape[1:], cut)
            if stacked:
                own = megatron.stacked_expert(own, "experts.down", number, experts)
            local.append(downs[number].chunk(etp, dim=1)[cut.rank])
            parts.append(own)
        ranks.append((local, parts))
    flat = [(tensor, parts) for local, all_parts in ranks for tensor, parts in zip(local, all_parts, strict=True)]
    expected = {"experts.down": downs} if stacked else {f"experts.{e}.down": downs[e] for e in range(experts)}
    check(flat, expected)


def test_a_pipeline_stage_gets_the_numbers_of_the_model() -> None:
    rename = megatron.renumbered("decoder.layers.", 12)
    assert rename("decoder.layers.3.mlp.experts.3.weight") == "decoder.layers.15.mlp.experts.3.weight"
    assert rename("embedding.word_embeddings.weight") == "embedding.word_embeddings.weight"


def test_what_does_not_divide_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match="tensor w: 7 rows or columns do not divide by 2 ranks"):
        megatron.column_parallel("w", (7, 2), Axis(0, 2))
    with pytest.raises(BadInput, match="tensor q: 6 heads do not divide by 4 groups"):
        megatron.fused_qkv(Attention("q", "k", "v", 6, 4, 8, (3,)), Axis())
