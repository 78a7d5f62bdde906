"""Run by every rank: ``worker.py SCENARIO[:ARGUMENT,...][;SCENARIO...] URL DIRECTORY``. What returns has passed."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from functools import partial
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))

from tiny import adapter_layout, adapter_rules, adapter_state, build, data_rank, full_state, load_full, train

from dcr_s3 import Receiver
from dcr_s3.errors import OwnerFailed, StateMismatch
from dcr_s3.mapping.gpt import Gpt, gpt_shards
from dcr_s3.mapping.megatron import ALONE, Axis
from dcr_s3.sender import Sender
from dcr_s3.sending.segments import SegmentWriter
from dcr_s3.training import Publisher, shards_of

BF16 = partial(shards_of, dtype=torch.bfloat16)


def rank() -> int:
    return dist.get_rank()


def save(directory: Path, state: dict[str, torch.Tensor]) -> None:
    directory.mkdir(parents=True)
    save_file(state, directory / "model.safetensors")


def check(url: str, mirror: Path, expected: dict[str, torch.Tensor], version: int) -> None:
    """Pulls into ``mirror`` and compares every bit. Rank 0 only; the others wait."""
    if rank() == 0:
        assert Receiver(url, mirror).pull().version == version
        found = load_file(mirror / "model.safetensors")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    dist.barrier()


def versions(how: str, url: str, directory: Path) -> None:
    """Several optimizer steps, each published by shards, compared with the gathered model."""
    model = build(how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mirror = directory / f"mirror-{how}"
    state = full_state(model)
    if rank() == 0:
        save(mirror, state)
    with Publisher.open(f"{url}/{how}", model, layout=BF16, replicas="full") as publisher:
        publisher.attach(optimizer)
        for step in range(1, 4):
            train(model, optimizer, step, data_rank(how))
            with torch.no_grad():
                model(torch.zeros(1, 4, dtype=torch.int64))
            publisher.step(model, step)
            expected = full_state(model)
            train_ahead = step == 2
            if train_ahead:
                train(model, optimizer, 100, data_rank(how))
            report = publisher.wait()
            assert report.step == step
            assert report.changed_elements > 0
            check(f"{url}/{how}", mirror, expected, report.version)


def first_life(how: str, url: str, directory: Path) -> None:
    """Four ranks publish from a base checkpoint, into files instead of RAM, and leave their weights behind."""
    model = build(how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = full_state(model)
    if rank() == 0:
        save(directory / "base", state)
    dist.barrier()
    with Publisher.open(
        f"{url}/lives", model, layout=BF16, base=directory / "base", baseline_dir=directory / "shares"
    ) as publisher:
        for step in (1, 2):
            train(model, optimizer, step, data_rank(how))
            weights = full_state(model, torch.float32)
            publisher.step(model, step).result()
            if rank() == 0:
                save(directory / f"weights-{step}", weights)


def second_life(how: str, url: str, directory: Path) -> None:
    """Other ranks, another layout. Older weights: the baseline comes from the bucket. Newest weights: from them."""
    for number, step in enumerate((1, 2)):
        model = build(how)
        load_full(model, load_file(directory / "weights-2" / "model.safetensors"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        expected = full_state(model)
        if step == 1:
            train(model, optimizer, 50, data_rank(how))
        newest = full_state(model)
        state_dir = directory / f"state-{number}"
        with Publisher.open(
            f"{url}/lives", model, layout=BF16, base=directory / "base", state_dir=state_dir
        ) as publisher:
            assert state_dir.exists() == (step == 1)
            if step == 1:
                report = publisher.step(model).result()
                assert 0 < report.changed_elements < report.total_elements
                check(f"{url}/lives", directory / "base", newest, report.version)
                load_full(model, load_file(directory / "weights-2" / "model.safetensors"))
            report = publisher.step(model).result()
            check(f"{url}/lives", directory / "base", expected, report.version)


def residuals(_: str, url: str, directory: Path) -> None:
    """Merged LoRA, block-scaled fp8, a tied head and an export hook, under FSDP2."""
    model = build("adapters")
    calls: dict[str, int] = {}
    rules = adapter_rules(calls)
    mirror = directory / "adapters"
    expected = adapter_state(model)
    if rank() == 0:
        save(mirror, expected)
    where = f"{url}/adapters"
    with Publisher.open(where, model, layout=adapter_layout, residuals=rules) as publisher:
        report = publisher.step(model).result()
        assert report.changed_elements == 0

        calls.clear()
        with torch.no_grad():
            model.lora_b.to_local()[:1, :1] += 1 / 64
        report = publisher.step(model).result()
        assert set(calls) == {"lora"}
        check(where, mirror, adapter_state(model), report.version)

        with torch.no_grad():
            model.scale.mul_(1.5)
        report = publisher.step(model).result()
        assert report.changed_elements > 1000
        check(where, mirror, adapter_state(model), report.version)

        calls.clear()
        before = adapter_state(model)
        with torch.no_grad():
            model.lora_a.to_local().neg_()
            model.lora_b.to_local().neg_()
        report = publisher.step(model).result()
        assert calls["lora"] == 1
        assert report.changed_elements == 0
        assert report.segments == 0

        with torch.no_grad():
            model.quantised.weight.to_local().mul_(1.001)
            model.head.weight.to_local().add_(1 / 32)
        report = publisher.step(model).result()
        after = adapter_state(model)
        assert not torch.equal(before["q.scale"], after["q.scale"])
        check(where, mirror, after, report.version)

        calls.clear()
        with pytest.raises(OwnerFailed if rank() != 1 else ZeroDivisionError):
            calls["fail"] = 1 if rank() == 1 else 0
            publisher.step(model).result()
        calls.clear()
        report = publisher.step(model).result()
        assert report.changed_elements == 0


def megatron(kind: str, url: str, directory: Path) -> None:
    """Real Megatron layers at TP = 2, several optimizer steps, against an independent conversion."""
    import gpt_reference as gpt

    model = gpt.build(kind)
    both = Axis(rank(), dist.get_world_size())
    sizes = Gpt(
        gpt.HIDDEN, gpt.INNER, gpt.HEADS, 1 if kind == "few" else gpt.GROUPS, gpt.HEAD, gpt.VOCAB,
        tp=ALONE if kind == "experts" else both, experts=gpt.EXPERTS, expert_inner=gpt.EXPERT_INNER, ep=both,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    where, mirror = f"{url}/{kind}", directory / kind
    expected = gpt.reference(model, kind)
    if rank() == 0:
        save(mirror, expected)
    layout = partial(gpt_shards, sizes=sizes, dtype=torch.bfloat16)
    with Publisher.open(where, model, layout=layout, replicas="full") as publisher:
        publisher.attach(optimizer)
        for step in (1, 2, 3):
            gpt.optimise(model, kind, optimizer, step)
            report = publisher.step(model, step).result()
            assert report.changed_elements > 0
            check(where, mirror, gpt.reference(model, kind), report.version)


def moved_elements(trace: profile) -> int:
    """Elements that went into collectives, over all threads of this process."""
    collectives = [e for e in trace.events() if e.name.startswith("gloo:")]
    return sum(prod(shape) for e in collectives for shape in e.input_shapes if shape)


def profiled() -> profile:
    config = _ExperimentalConfig(profile_all_threads=True)
    return profile(activities=[ProfilerActivity.CPU], record_shapes=True, experimental_config=config)


def quiet(how: str, url: str, directory: Path) -> None:
    """No collective moves weights while a version is published; every rank has its share of the work."""
    model = build(how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Publisher.open(f"{url}/quiet-{how}", model, layout=BF16) as publisher:
        with profiled() as training:
            train(model, optimizer, 1, data_rank(how))
        with profiled() as publishing:
            report = publisher.step(model).result()
        assert report.changed_elements > 0
        assert moved_elements(training) > report.total_elements // 3
        assert 0 < moved_elements(publishing) < 6_000 < report.total_elements // 5
        shares = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(shares, torch.tensor([publisher.owned_bytes]))
        assert sum(int(s) for s in shares) == report.dense_bytes
        assert max(int(s) for s in shares) < 1.15 * report.dense_bytes / len(shares)


def torn(how: str, url: str, directory: Path) -> None:
    """One rank's replica differs in one bit: nothing is published, the tensor and the rank are named on all ranks."""
    model = build(how)
    with Publisher.open(f"{url}/torn", model, layout=BF16, replicas="full") as publisher:
        before = publisher.position
        bias = next(p for n, p in model.named_parameters() if n.endswith("layers.1.mlp.down_proj.bias"))
        if rank() == 1:
            with torch.no_grad():
                bias[3] += 1
        with pytest.raises(StateMismatch, match=r"tensor layers\.1\.mlp\.down_proj\.bias: replicas on rank [01] hold"):
            publisher.step(model).result()
        assert publisher.position == before
        if rank() == 1:
            with torch.no_grad():
                bias[3] -= 1
        assert publisher.step(model).result().version == before.version + 1


def death(_: str, url: str, directory: Path) -> None:
    """Rank 2 is killed after its first segment is up; the others say who it was, and keep the old version."""
    model = build("ddp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mirror = directory / "mirror"
    if rank() == 0:
        save(mirror, full_state(model))
    dist.barrier()
    Sender.least_segment_bytes = 1
    publisher = Publisher.open(f"{url}/death", model, layout=BF16, timeout_s=8)
    before = publisher.position
    train(model, optimizer, 1, 0)
    if rank() == 2:
        complete = SegmentWriter._complete

        def die(self: SegmentWriter, *given: object) -> object:
            complete(self, *given)
            os.kill(os.getpid(), signal.SIGKILL)

        SegmentWriter._complete = die
    with pytest.raises(OwnerFailed, match=r"version 2: owner 2 did not finish within 8 s"):
        publisher.step(model).result()
    assert publisher.position == before
    if rank() == 0:
        assert Receiver(f"{url}/death", mirror).pull().version == 1
    os._exit(0)  # the group has lost a member: nothing collective can end well


def place() -> dict[str, int]:
    """Rank and size, where no launcher keeps a store for the ranks to meet at."""
    if "DCR_TEST_RENDEZVOUS" not in os.environ:
        return {}
    return {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}


def main() -> None:
    scenario, url, directory = sys.argv[1:]
    faulthandler.dump_traceback_later(150, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=os.environ.get("DCR_TEST_RENDEZVOUS", "env://"), **place())
    try:
        for part in scenario.split(";"):
            name, _, arguments = part.partition(":")
            for argument in arguments.split(","):
                globals()[name](argument, url, Path(directory))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
