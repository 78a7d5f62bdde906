"""What tracing finds out about loaders of every kind, without writing a bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from dcr_s3.errors import BadInput, StateMismatch
from dcr_s3.targets.placement import Placement, Route
from dcr_s3.targets.placement_bind import bind_loader
from dcr_s3.targets.residence import block_cells
from dcr_s3.targets.storages import Storages, module_tensors

sys.path.insert(0, str(Path(__file__).parent))
import toys

EXACT = [toys.Fused, toys.Split, toys.Transposed]


def bind(toy: toys.Toy, state: toys.State, **options: object) -> tuple[Placement, Storages]:
    before = toys.bits(toy)
    storages = Storages(module_tensors(toy))
    placement = bind_loader(toy.load_weights, storages, toys.specs_of(state), **options)
    assert toys.bits(toy) == before
    return placement, storages


def routes(placement: Placement) -> dict[str, str]:
    return {spec.name: plan.route.value for spec, plan in zip(placement.specs, placement.plans, strict=True)}


@pytest.mark.parametrize("kind", EXACT)
def test_planned_blocks_show_the_canonical_bits(kind: type[toys.Toy]) -> None:
    toy, state = kind(), toys.random_state(kind)
    placement, storages = bind(toy, state)
    toy.load_weights(state.items())
    for spec, plan in zip(placement.specs, placement.plans, strict=True):
        if spec.name == "elsewhere":
            assert plan.route is Route.SKIPPED
            continue
        assert plan.route is Route.PLANNED
        for block in plan.blocks:
            assert np.array_equal(block_cells(storages, block), block.region.gather(toys.cells_of(state[spec.name])))


def test_every_engine_element_is_placed_once() -> None:
    toy, state = toys.Transposed(), toys.random_state(toys.Transposed)
    placement, storages = bind(toy, state)
    placed = sum(b.region.cells for plan in placement.plans for b in plan.blocks)
    assert placed == sum(s.cells.numel() for s in storages.items)
    assert all(placement.holds(n) for n in range(len(state)))


def test_both_ranks_together_hold_a_split_tensor() -> None:
    state = toys.random_state(toys.Split)
    regions = []
    for rank in (0, 1):
        placement, _ = bind(toys.Split(rank), state)
        regions += [b.region for b in placement.plans[1].blocks]
    cells = [int(c) for r in regions for c in r.canonical(np.arange(r.cells, dtype=np.uint32))]
    assert sorted(cells) == list(range(48))


def test_padding_is_no_missing_element_and_a_number_goes_through_the_loader() -> None:
    placement, _ = bind(toys.Padded(), toys.random_state(toys.Padded))
    assert routes(placement) == {"vocabulary": "planned", "scale": "loader"}


def test_conversions_go_through_the_loader_but_keep_their_places() -> None:
    placement, _ = bind(toys.Converting(), toys.random_state(toys.Converting))
    assert set(routes(placement).values()) == {"loader"}
    assert all(placement.holds(n) for n in range(len(placement.specs)))


def test_a_buffering_loader_makes_one_group() -> None:
    placement, _ = bind(toys.Buffering(), toys.random_state(toys.Buffering))
    assert routes(placement) == {"q": "dense", "k": "dense", "v": "dense", "plain": "planned"}
    assert {placement.plans[n].group for n in range(3)} == {(0, 1, 2)}
    assert "cat" in placement.plans[0].reason or "copy_" in placement.plans[0].reason


def test_the_later_of_two_names_for_one_storage_wins() -> None:
    placement, _ = bind(toys.Tied(), toys.random_state(toys.Tied))
    assert routes(placement) == {"embed": "skipped", "head": "planned"}
    assert placement.fixed == ("counter",)


def test_a_parameter_that_no_tensor_fills_is_refused_by_name() -> None:
    state = toys.random_state(toys.Fused)
    del state["k"]
    with pytest.raises(BadInput, match=r"qkv: 18 of its 84 elements"):
        bind(toys.Fused(), state)
    placement, _ = bind(toys.Fused(), state, unwritten=["qkv"])
    assert len(placement.plans) == 5


def test_an_unknown_name_is_refused_by_name() -> None:
    state = toys.random_state(toys.Fused)
    state["mystery"] = torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(BadInput, match="tensor mystery: the engine's loader does not take it"):
        bind(toys.Fused(), state)


def test_a_loader_that_replaces_memory_is_refused_and_undone() -> None:
    class Replacing(toys.Fused):
        def place(self, name: str, tensor: torch.Tensor) -> None:
            if name == "norm":
                self.norm.data = torch.zeros(6, dtype=torch.bfloat16)
            else:
                super().place(name, tensor)

    with pytest.raises(BadInput, match="norm: the loader replaces its storage"):
        bind(Replacing(), toys.random_state(toys.Fused))


def test_a_number_that_turns_up_elsewhere_is_not_trusted() -> None:
    class Scaled(toys.Toy):
        SHAPES: ClassVar[toys.Shapes] = {"weight": ((4, 3), torch.bfloat16)}
        CANONICAL: ClassVar[toys.Extents] = {"scale": (1,), "weight": (4, 3)}
        scale = 1.0

        def place(self, name: str, tensor: torch.Tensor) -> None:
            if name == "scale":
                self.scale = tensor.item() * 2
            else:
                self.weight.data.copy_(tensor * self.scale)

    placement, _ = bind(Scaled(), toys.random_state(Scaled))
    assert placement.plans[1].route is Route.DENSE
    assert placement.plans[1].group == (0, 1)


def test_a_scale_tensor_and_its_weight_are_one_group() -> None:
    class Folded(toys.Toy):
        SHAPES: ClassVar[toys.Shapes] = {"weight": ((4, 3), torch.bfloat16), "bias": ((3,), torch.bfloat16)}
        CANONICAL: ClassVar[toys.Extents] = {"scale": (4, 1), "weight": (4, 3), "bias": (3,)}
        scale = torch.ones(1)

        def place(self, name: str, tensor: torch.Tensor) -> None:
            if name == "scale":
                self.scale = tensor
            else:
                getattr(self, name).data.copy_(tensor * self.scale if name == "weight" else tensor)

    placement, _ = bind(Folded(), toys.random_state(Folded))
    assert routes(placement) == {"scale": "dense", "weight": "dense", "bias": "planned"}


def test_a_part_overwritten_by_another_tensor_is_one_group() -> None:
    class Patching(toys.Toy):
        SHAPES: ClassVar[toys.Shapes] = {"weight": ((4, 3), torch.bfloat16)}
        CANONICAL: ClassVar[toys.Extents] = {"weight": (4, 3), "patch": (2, 3)}

        def place(self, name: str, tensor: torch.Tensor) -> None:
            self.weight.data[: tensor.shape[0]].copy_(tensor)

    placement, _ = bind(Patching(), toys.random_state(Patching))
    assert routes(placement) == {"weight": "dense", "patch": "dense"}


def test_zeroing_first_is_no_conflict() -> None:
    class Clearing(toys.Fused):
        def place(self, name: str, tensor: torch.Tensor) -> None:
            if name == "q":
                self.qkv.data.zero_()
            super().place(name, tensor)

    placement, _ = bind(Clearing(), toys.random_state(toys.Fused))
    assert set(routes(placement).values()) == {"planned"}


def test_moved_and_new_memory_is_noticed() -> None:
    toy, state = toys.Fused(), toys.random_state(toys.Fused)
    _, storages = bind(toy, state)
    storages.check_in_place(module_tensors(toy))
    toy.norm.data = toy.norm.data.clone()
    with pytest.raises(StateMismatch, match="norm: its storage moved"):
        storages.check_in_place(module_tensors(toy))
    other = toys.Fused()
    _, storages = bind(other, state)
    other.gate_up = other.qkv
    with pytest.raises(StateMismatch, match="gate_up"):
        storages.check_in_place(module_tensors(other))


def test_a_plain_module_is_placed_through_load_state_dict() -> None:
    from dcr_s3.targets.module import state_dict_loader

    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    state = {n: t.clone() for n, t in module.state_dict().items()}
    storages = Storages(module_tensors(module))
    placement = bind_loader(state_dict_loader(module), storages, toys.specs_of(state))
    assert {p.route for p in placement.plans} == {Route.PLANNED}
