"""The main job on a memory store: whatever is published is what a mirror holds, bit for bit."""

from __future__ import annotations

import itertools
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcr_s3 import Receiver, Sender, init_run, verify_directory
from dcr_s3.errors import (
    BadInput,
    ChainBroken,
    CommitConflict,
    CorruptObject,
    Fenced,
    RunExists,
    RunMissing,
    StateMismatch,
    UnsupportedFormat,
    WrongBase,
)
from dcr_s3.format.keys import manifest_key
from dcr_s3.sending import blocks as blocks_module
from dcr_s3.store.memory import MemoryStore
from dcr_s3.store.metered import MeteredStore
from dcr_s3.testing.checkpoints import State, changed, differing, load, make_state, save

sys.path.insert(0, str(Path(__file__).parent))
from states import tensors

BASE = make_state(1)


@pytest.fixture(autouse=True)
def _state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCR_STATE_DIR", str(tmp_path / "state"))


def segments(store: MemoryStore) -> list[str]:
    return [o.key for o in store.list("segments/")]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seeds=st.lists(st.tuples(st.integers(0, 99), st.sampled_from([0.0, 0.01, 0.3, 1.0])), min_size=1, max_size=3),
    order=st.randoms(use_true_random=False),
    workers=st.sampled_from([0, 1, 3]),
    context=st.booleans(),
    how=st.sampled_from(["add", "borrow", "dict", "iterator", "directory"]),
)
def test_mirrors_equal_what_was_published(tmp_path_factory, seeds, order, workers, context, how) -> None:  # type: ignore[no-untyped-def]
    tmp_path = tmp_path_factory.mktemp("run")
    store = MemoryStore()
    base = save(BASE, tmp_path / "base", shards=2)
    state = BASE
    with Sender.open(store, base=base, state_dir=tmp_path / "state", context=context, workers=workers) as sender:
        for seed, fraction in seeds:
            state = changed(state, seed, fraction)
            pairs = list(tensors(state).items())
            order.shuffle(pairs)
            if how in ("add", "borrow"):
                with sender.version(step=seed) as version:
                    for name, tensor in pairs:
                        version.add(name, tensor, borrow=how == "borrow")
                        if how == "add":
                            tensor.view(-1).view(torch.uint8).zero_() if tensor.dim() and tensor.numel() else None
                report = version.report
            elif how == "directory":
                report = sender.publish(save(state, tmp_path / f"v{sender.position.version}"), step=seed)
            else:
                report = sender.publish(dict(pairs) if how == "dict" else iter(pairs), step=seed)
            assert report.wire_bytes > 0
    receiver = Receiver(store, tmp_path / "mirror", base=base, workers=workers)
    pulled = receiver.pull()
    assert differing(load(tmp_path / "mirror"), state) == []
    assert pulled.version == sender.position.version
    assert pulled.step == seeds[-1][0]
    assert verify_directory(store, tmp_path / "mirror").version == pulled.version
    assert receiver.pull().up_to_date


def test_a_version_without_changes_is_tiny_and_counts(tmp_path: Path) -> None:
    store = MemoryStore()
    with Sender.open(store, base=tensors(BASE)) as sender:
        report = sender.publish(tensors(BASE))
    assert (report.changed_elements, report.segments) == (0, 0)
    assert report.wire_bytes < 2000
    assert segments(store) == []
    pulled = Receiver(store, tmp_path / "m", base=save(BASE, tmp_path / "base")).pull()
    assert pulled.version == report.version


def test_a_device_tensor_and_a_strided_tensor_are_sent_as_their_bits(tmp_path: Path) -> None:
    state = changed(BASE, 5)
    given_tensors = tensors(state)
    given_tensors["embed"] = given_tensors["embed"].t().contiguous().t()
    assert not given_tensors["embed"].is_contiguous()
    store = MemoryStore()
    with Sender.open(store, base=tensors(BASE)) as sender:
        sender.publish(given_tensors)
    Receiver(store, tmp_path / "m", base=save(BASE, tmp_path / "base")).pull()
    assert differing(load(tmp_path / "m"), state) == []


def test_large_tensors_are_cut_into_blocks_and_segments(tmp_path: Path) -> None:
    shapes = {"big": ("BF16", (3000, 4096)), "turned": ("BF16", (4096, 3000)), "tiny": ("BF16", (3,))}
    base = make_state(1, shapes)
    state = changed(base, 2, 0.01)
    given_tensors = tensors(state)
    given_tensors["turned"] = given_tensors["turned"].t().contiguous().t()
    store = MemoryStore()
    with Sender.open(store, base=tensors(base)) as sender:
        report = sender.publish(iter(given_tensors.items()))
    assert report.changed_elements > 200_000
    Receiver(store, tmp_path / "m", base=save(base, tmp_path / "base")).pull()
    assert differing(load(tmp_path / "m"), state) == []


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.pop("mask"), "tensor mask not added"),
        (lambda t: t.update(zz=t["mask"]), "tensor zz: unknown"),
        (lambda t: t.update(mask=t["steps"]), r"tensor mask: is I64 \[3\], the run has BOOL \[7\]"),
        (lambda t: t.update(mask=t["mask"].to_sparse()), "tensor mask: has no dense storage"),
        (lambda t: t.update(mask=t["mask"].to("meta")), "tensor mask: has no dense storage"),
        (lambda t: t.update(mask=[1]), "tensor mask: is a list"),
    ],
)
def test_bad_tensors_are_refused_by_name_and_nothing_is_lost(spoil, message: str) -> None:  # type: ignore[no-untyped-def]
    store = MemoryStore()
    with Sender.open(store, base=tensors(BASE)) as sender:
        before = sender.position
        bad = tensors(changed(BASE, 2))
        spoil(bad)
        with pytest.raises(BadInput, match=message):
            sender.publish(bad)
        assert sender.position == before
        assert segments(store) == []
        good = sender.publish(tensors(changed(BASE, 3)))
        assert good.version == before.version + 1


def test_a_tensor_added_twice_is_refused() -> None:
    with Sender.open(MemoryStore(), base=tensors(BASE)) as sender, pytest.raises(BadInput, match="mask: added twice"):
        sender.publish([("mask", tensors(BASE)["mask"])] * 2)


def test_an_exception_in_the_block_aborts_and_changes_nothing() -> None:
    store = MemoryStore()
    with Sender.open(store, base=tensors(BASE)) as sender:
        manifests = [o.key for o in store.list("manifests/")]
        with pytest.raises(ZeroDivisionError), sender.version() as version:
            version.add("embed", tensors(changed(BASE, 2))["embed"])
            raise ZeroDivisionError
        assert [o.key for o in store.list("manifests/")] == manifests
        assert segments(store) == []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("failing", [1, 2, 3, 4, 5, 6, 7])
def test_a_block_that_cannot_be_coded_fails_the_version_whichever_it_is(
    workers: int, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = blocks_module.encode_block, itertools.count(1)

    def breaking(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) == failing:
            raise MemoryError
        return real(*arguments, **keywords)

    store = MemoryStore()
    with Sender.open(store, base=tensors(BASE), workers=workers) as sender:
        before = sender.position
        with monkeypatch.context() as patch:
            patch.setattr(blocks_module, "encode_block", breaking)
            with pytest.raises(MemoryError):
                sender.publish(tensors(changed(BASE, 2)))
        assert next(calls) > failing
        assert sender.position == before
        assert segments(store) == []


def test_tied_weights_are_one_tensor_with_two_names(tmp_path: Path) -> None:
    def tied(state: State) -> dict[str, torch.Tensor]:
        given_tensors = tensors(state)
        return {**given_tensors, "head": given_tensors["embed"]}

    store = MemoryStore()
    new = changed(BASE, 4)
    with Sender.open(store, base=tied(BASE)) as sender:
        assert sender.run.tensors[0].aliases == ("head",)
        sender.publish(tied(new))
        apart = {**tensors(new), "head": tensors(changed(new, 5, 0.5))["embed"]}
        with pytest.raises(BadInput, match="head: the run ties it to embed, but their bits differ"):
            sender.publish(apart)
    both = save({**BASE, "head": BASE["embed"]}, tmp_path / "both")
    Receiver(store, tmp_path / "m", base=both).pull()
    assert differing(load(tmp_path / "m"), {**new, "head": new["embed"]}) == []


def test_a_second_sender_takes_over_and_the_first_one_must_stop() -> None:
    store = MemoryStore()
    with Sender.open(store, base=tensors(BASE)) as first, Sender.open(store, base=tensors(BASE)) as second:
        with pytest.raises(Fenced, match="newer sender"):
            first.publish(tensors(changed(BASE, 2)))
        assert segments(store) == []
        second.publish(tensors(changed(BASE, 3)))


def test_of_two_one_shot_publishers_one_wins_and_the_other_is_told() -> None:
    store = MemoryStore()
    with (
        Sender.open(store, base=tensors(BASE), fence=False) as first,
        Sender.open(store, base=tensors(BASE), fence=False) as second,
    ):
        assert first.publish(tensors(changed(BASE, 2))).version == 1
        with pytest.raises(CommitConflict, match="another sender committed version 1"):
            second.publish(tensors(changed(BASE, 3)))


def test_a_run_with_another_base_is_refused_by_tensor(tmp_path: Path) -> None:
    store = MemoryStore()
    init_run(store, save(BASE, tmp_path / "a"))
    one_bit = {**BASE, "mask": changed({"mask": BASE["mask"]}, 3, 0.9)["mask"]}
    with pytest.raises(RunExists, match="tensor mask"):
        init_run(store, save(one_bit, tmp_path / "b"))
    assert init_run(store, tmp_path / "a").run_id == init_run(store, tmp_path / "a").run_id
    with pytest.raises(BadInput, match="tensor mask"):
        Receiver(store, tmp_path / "m", base=tmp_path / "b").pull()


def test_no_run_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(RunMissing, match="no run here"):
        Receiver(MemoryStore(), tmp_path / "m").pull()
    with pytest.raises(RunMissing, match="no run here"):
        Sender.open(MemoryStore())


def test_a_receiver_without_base_uses_the_snapshot_or_says_what_is_missing(tmp_path: Path) -> None:
    base = save(BASE, tmp_path / "base", shards=3)
    with_snapshot, without = MemoryStore(), MemoryStore()
    init_run(with_snapshot, base, upload_base=True)
    init_run(without, base)
    assert Receiver(with_snapshot, tmp_path / "m").pull().version == 0
    assert differing(load(tmp_path / "m"), BASE) == []
    assert (tmp_path / "m" / "config.json").read_text() == "{}"
    with pytest.raises(BadInput, match="--base"):
        Receiver(without, tmp_path / "n").pull()


def published(tmp_path: Path) -> tuple[MemoryStore, Path, State]:
    """A run with one version, published from a directory."""
    store = MemoryStore()
    base = save(BASE, tmp_path / "base")
    state = changed(BASE, 2)
    with Sender.open(store, base=base, fence=False) as sender:
        sender.publish(tensors(state))
    return store, base, state


@pytest.mark.parametrize("key", ["segment", "manifest"])
def test_a_flipped_bit_or_a_truncation_is_noticed_before_anything_is_touched(tmp_path: Path, key: str) -> None:
    store, base, state = published(tmp_path)
    name = segments(store)[0] if key == "segment" else manifest_key(1)
    whole = store.get(name, limit_bytes=1 << 20)
    assert whole is not None
    receiver = Receiver(store, tmp_path / "m", base=base)
    for body in (whole.body[:-1], whole.body[: len(whole.body) // 2], *flips(whole.body, 12)):
        store.put(name, body)
        with pytest.raises((CorruptObject, ChainBroken, UnsupportedFormat), match=name.split("/")[0]):
            receiver.pull()
        assert differing(load(tmp_path / "m"), BASE) == []
    store.put(name, whole.body)
    assert receiver.pull().version == 1
    assert differing(load(tmp_path / "m"), state) == []


def flips(body: bytes, count: int) -> list[bytes]:
    places = range(0, len(body) - 1, max(1, len(body) // count))
    return [body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :] for at in places]


def test_a_missing_segment_breaks_the_chain_by_name(tmp_path: Path) -> None:
    store, base, _ = published(tmp_path)
    store.delete(segments(store))
    with pytest.raises(ChainBroken, match="segments/000000000001/"):
        Receiver(store, tmp_path / "m", base=base).pull()


def test_a_mirror_whose_bits_were_altered_is_refused_and_named(tmp_path: Path) -> None:
    store, base, _ = published(tmp_path)
    Receiver(store, tmp_path / "m", base=base).pull(to_version=0)
    with (tmp_path / "m" / "model.safetensors").open("r+b") as file:
        file.seek(1200)
        file.write(b"\x55" * 900)
    with pytest.raises(WrongBase, match="embed"):
        Receiver(store, tmp_path / "m").pull()
    with pytest.raises(StateMismatch, match="embed"):
        verify_directory(store, tmp_path / "m")


def test_follow_applies_versions_as_they_come_and_looks_once_per_poll(tmp_path: Path) -> None:
    store = MemoryStore()
    base = save(BASE, tmp_path / "base")
    state = BASE
    watched = MeteredStore(store)
    seen: list[int] = []
    arrived = threading.Event()

    def note(report) -> None:  # type: ignore[no-untyped-def]
        seen.append(report.version)
        arrived.set()

    with Sender.open(store, base=base) as sender:
        receiver = Receiver(watched, tmp_path / "m", base=base)
        stop = threading.Event()
        thread = threading.Thread(target=lambda: receiver.follow(note, stop, poll_interval_s=0.02))
        thread.start()
        try:
            for step in range(3):
                state = changed(state, step)
                arrived.clear()
                wanted = sender.publish(tensors(state)).version
                while seen[-1:] != [wanted]:
                    assert arrived.wait(20)
                    arrived.clear()
        finally:
            stop.set()
            thread.join(20)
    assert differing(load(tmp_path / "m"), state) == []
    assert seen[-3:] == [2, 3, 4]
    assert watched.meter.traffic.requests["list"] == 0


def test_a_published_version_costs_its_segments_and_its_manifest(tmp_path: Path) -> None:
    with Sender.open(MemoryStore(), base=tensors(BASE)) as sender:
        report = sender.publish(tensors(changed(BASE, 2)))
        assert report.requests == report.segments + 1
        assert sender.publish(tensors(changed(BASE, 2))).requests == 1


def test_a_checkpoint_that_is_not_a_mirror_yet_is_adopted_in_place(tmp_path: Path) -> None:
    store, _, state = published(tmp_path)
    save(BASE, tmp_path / "mine", shards=2)
    assert Receiver(store, tmp_path / "mine").pull().from_version == 0
    assert differing(load(tmp_path / "mine"), state) == []
    save(state, tmp_path / "newest")
    assert Receiver(store, tmp_path / "newest").pull().up_to_date
    assert verify_directory(store, save(state, tmp_path / "plain")).version == 1
