"""One process, no process group: what the publisher refuses, and that training cannot tear a version."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dcr_s3 import Receiver
from dcr_s3.errors import BadInput, CommitConflict, Fenced, RunExists
from dcr_s3.format.signature import SharedSecret, Verifier
from dcr_s3.mapping.conversions import merged_lora, stacked_experts
from dcr_s3.sending.version import VersionWriter
from dcr_s3.store.memory import MemoryStore
from dcr_s3.training import Part, Publisher, Residual, Shard, View, shards_of
from dcr_s3.training.publisher import Layout

BF16 = partial(shards_of, dtype=torch.bfloat16)
open_publisher = partial(Publisher.open, layout=BF16, workers=1)


def model(*, tie: bool = False) -> nn.Module:
    torch.manual_seed(1)
    made = nn.ModuleDict({"a": nn.Linear(24, 16), "b": nn.Linear(16, 24, bias=False), "n": nn.BatchNorm1d(16)})
    if tie:
        made["b"] = nn.Linear(24, 16, bias=False)
        made["b"].weight = made["a"].weight
    return made


def served(module: nn.Module) -> dict[str, Tensor]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {n: (t.bfloat16() if n in parameters else t).detach().clone() for n, t in module.state_dict().items()}


def change(module: nn.Module, by: float = 0.01) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(by)


def base_of(directory: Path, state: dict[str, Tensor]) -> Path:
    directory.mkdir()
    save_file(state, directory / "model.safetensors")
    return directory


def check(store: MemoryStore, mirror: Path, expected: dict[str, Tensor]) -> None:
    Receiver(store, mirror).pull()
    found = load_file(mirror / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_parameters_are_cast_buffers_are_not(memory_store: MemoryStore, tmp_path: Path) -> None:
    module = model()
    mirror = base_of(tmp_path / "mirror", served(module))
    with open_publisher(memory_store, module) as publisher:
        change(module)
        module["n"](torch.randn(4, 16))
        report = publisher.step(module, 7).result()
        assert (report.version, report.step) == (2, 7)
        check(memory_store, mirror, served(module))


@pytest.mark.parametrize("stored", ["once", "twice"])
def test_tied_weights_are_sent_to_every_tensor_that_the_run_has_of_them(
    memory_store: MemoryStore, tmp_path: Path, stored: str
) -> None:
    module = model(tie=True)
    state = served(module)
    if stored == "once":
        del state["b.weight"]
    base = base_of(tmp_path / "base", state)
    with open_publisher(memory_store, module, base=base) as publisher:
        change(module)
        publisher.step(module).result()
    expected = served(module)
    check(memory_store, base, {name: expected[name] for name in state})


def test_an_optimizer_step_waits_until_the_weights_have_been_compared(
    memory_store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    mirror = base_of(tmp_path / "mirror", served(module))
    go_on, stepped = threading.Event(), threading.Event()
    add_piece = VersionWriter.add_piece

    def slowly(self: VersionWriter, *given: object) -> None:
        go_on.wait(10)
        add_piece(self, *given)

    monkeypatch.setattr(VersionWriter, "add_piece", slowly)
    with open_publisher(memory_store, module) as publisher:
        publisher.attach(optimizer)
        change(module)
        expected = served(module)
        published = publisher.step(module)
        module["n"](torch.randn(4, 16))  # a forward pass changes buffers while they are being published
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        training = threading.Thread(target=lambda: (optimizer.step(), stepped.set()))
        training.start()
        assert not stepped.wait(0.3)
        go_on.set()
        training.join(10)
        assert stepped.is_set()
        published.result()
        check(memory_store, mirror, expected)
        publisher.step(module).result()
        check(memory_store, mirror, served(module))


def test_a_restart_with_newer_weights_needs_a_base_and_says_so(memory_store: MemoryStore, tmp_path: Path) -> None:
    module = model()
    base = base_of(tmp_path / "base", served(module))
    with open_publisher(memory_store, module) as publisher:
        change(module)
        publisher.step(module).result()
    change(module)
    with pytest.raises(BadInput, match="give the base"):
        open_publisher(memory_store, module, state_dir=tmp_path / "a")
    with open_publisher(memory_store, module, base=base, state_dir=tmp_path / "b") as publisher:
        assert publisher.step(module).result().changed_elements > 0
    check(memory_store, base, served(module))


def test_a_signed_run(memory_store: MemoryStore, tmp_path: Path) -> None:
    module = model()
    signer = SharedSecret(b"k" * 32)
    mirror = base_of(tmp_path / "mirror", served(module))
    with open_publisher(memory_store, module, signer=signer) as publisher:
        change(module)
        publisher.step(module).result()
    Receiver(memory_store, mirror, verifier=Verifier([signer.verifier()])).pull()
    assert torch.equal(load_file(mirror / "model.safetensors")["b.weight"], module["b"].weight.detach().bfloat16())


def test_a_second_trainer_takes_over(memory_store: MemoryStore) -> None:
    module = model()
    first = open_publisher(memory_store, module)
    second = open_publisher(memory_store, module)
    change(module)
    with pytest.raises((Fenced, CommitConflict)):
        first.step(module).result()
    with pytest.raises((Fenced, CommitConflict)):
        first.step(module)
    second.step(module).result()
    first.close()
    second.close()


def layout_with(change_shards: Callable[[list[Shard]], list[Shard]]) -> Layout:
    return lambda module: change_shards(BF16(module))


def missing(shards: list[Shard]) -> list[Shard]:
    return [s for s in shards if s.key != "b.weight"]


def renamed(shards: list[Shard]) -> list[Shard]:
    return [replace(s, parts=tuple(replace(p, name=f"x.{p.name}") for p in s.parts)) for s in shards]


def cut(shards: list[Shard]) -> list[Shard]:
    short = Part("a.bias", (16,), View.of((15,)), View.of((15,)))
    return [replace(s, parts=(short,)) if s.key == "a.bias" else s for s in shards]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (missing, r"tensor b.weight of the run \(and 0 more\) is in no rank's layout"),
        (renamed, r"tensor x.a.weight: unknown to the run, which has 8 tensors"),
        (cut, r"tensor a.bias: element 15 of \[16\] is held by no rank"),
        (lambda shards: [*shards, *shards], "described twice"),
    ],
)
def test_a_layout_that_is_not_the_runs_is_refused_by_name(
    memory_store: MemoryStore, wrong: Callable[[list[Shard]], list[Shard]], message: str
) -> None:
    module = model()
    open_publisher(memory_store, module).close()
    with pytest.raises(BadInput, match=message):
        open_publisher(memory_store, module, layout=layout_with(wrong))


def test_a_layout_that_changes_later_is_refused_and_the_next_version_is_fine(memory_store: MemoryStore) -> None:
    module = model()
    broken: list[bool] = []
    with open_publisher(memory_store, module, layout=layout_with(lambda s: missing(s) if broken else s)) as publisher:
        broken.append(True)
        with pytest.raises(BadInput, match=r"training tensor b\.weight: is not in the layout any more"):
            publisher.step(module)
        broken.clear()
        assert publisher.step(module).result().changed_elements == 0


def test_a_run_with_other_tensors_is_not_overwritten(memory_store: MemoryStore) -> None:
    open_publisher(memory_store, model()).close()
    with pytest.raises((BadInput, RunExists)):
        open_publisher(memory_store, nn.Linear(3, 3))


def test_rules_that_contradict_each_other_are_refused() -> None:
    def rule(output: str, source: str) -> Residual:
        return Residual((output,), (source,), lambda tensors: {output: tensors[source]})

    module = nn.Linear(2, 2)
    for rules, message in (
        ([rule("x", "weight"), rule("x", "bias")], "tensor x: two conversions make it"),
        ([rule("x", "y"), rule("y", "x")], "its conversion depends on itself"),
        ([rule("x", "nothing")], "tensor nothing: the conversion to x needs it"),
        (
            [Residual(("x", "y"), ("weight",), lambda tensors: {"x": tensors["weight"]})],
            "tensor y: the conversion gave",
        ),
    ):
        with pytest.raises(BadInput, match=message):
            open_publisher(MemoryStore(), module, residuals=rules)


def test_a_conversion_of_a_conversion_follows_its_source(memory_store: MemoryStore, tmp_path: Path) -> None:
    module = nn.ParameterDict(
        {
            "base": nn.Parameter(torch.randn(6, 4)), "up": nn.Parameter(torch.randn(6, 2)),
            "down": nn.Parameter(torch.randn(2, 4)), "other": nn.Parameter(torch.randn(6, 4)),
        }
    )  # fmt: skip
    rules = [stacked_experts("stack", ["merged", "other"]), merged_lora("merged", "base", "down", "up", 0.5)]

    def state() -> dict[str, Tensor]:
        merged = (module["base"] + (module["up"] @ module["down"]) * 0.5).detach()
        return {"merged": merged, "stack": torch.stack([merged, module["other"].detach()])}

    mirror = base_of(tmp_path / "mirror", state())
    with open_publisher(memory_store, module, layout=lambda _: [], residuals=rules) as publisher:
        for name in ("up", "other"):
            with torch.no_grad():
                module[name].mul_(1.5)
            publisher.step(module).result()
            check(memory_store, mirror, state())


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
