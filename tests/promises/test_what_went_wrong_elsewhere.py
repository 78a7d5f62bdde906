"""Failures that users of other systems report, each impossible here by design."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dcr_s3 import Receiver, Sender, init_run
from dcr_s3.errors import (
    BadInput,
    ChainBroken,
    CorruptObject,
    RunExists,
    StateMismatch,
    StoreUnavailable,
    WrongBase,
)
from dcr_s3.format.keys import MANIFEST_PREFIX, SEGMENT_PREFIX, manifest_key, place_of
from dcr_s3.format.manifest import Manifest
from dcr_s3.reading import load_run, read_manifest
from dcr_s3.receiver import verify_directory
from dcr_s3.replay import Replay
from dcr_s3.store.memory import MemoryStore
from dcr_s3.store.metered import MeteredStore
from dcr_s3.targets.directory import DirectoryMirror
from dcr_s3.testing.checkpoints import changed, make_state, save, write_safetensors
from dcr_s3.workers import InlineExecutor

Trial = Any
HERE = InlineExecutor()


def failing_puts(trial: Trial, prefix: str, times: int = 1) -> list[str]:
    """The next puts below ``prefix`` fail before they happen."""
    put = trial.store.put
    failed: list[str] = []

    def failing(key: str, body: bytes, **condition: Any) -> str:
        if key.startswith(prefix) and len(failed) < times:
            failed.append(key)
            raise StoreUnavailable("503 SlowDown")
        return put(key, body, **condition)

    trial.store.put = failing
    return failed


def test_the_baseline_moves_only_with_the_commit(trial: Trial) -> None:
    with trial.sender() as sender:
        before = sender.position
        failed = failing_puts(trial, SEGMENT_PREFIX)
        lost = changed(trial.states[-1], 7, 0.2)
        with pytest.raises(StoreUnavailable):
            sender.publish(save(lost, trial.root / "lost", shards=2))
        assert len(failed) == 1
        assert sender.position == before
        trial.publish(sender, changed(lost, 8, 0.01))
    trial.receiver("one").pull()
    trial.assert_holds(2)


def test_a_version_is_committed_only_after_all_of_its_objects_are_there(trial: Trial) -> None:
    with trial.sender() as sender:
        put = trial.store.put
        seen: list[list[str]] = []

        def looking(key: str, body: bytes, **condition: Any) -> str:
            if key.startswith(MANIFEST_PREFIX):
                named = Manifest.from_bytes(bytes(body), where=key)
                there = trial.listed()
                seen.append([named.key(s) for s in named.segments])
                assert set(seen[-1]) <= set(there)
            return put(key, body, **condition)

        trial.store.put = looking
        trial.publish(sender)
    assert len(seen) == 1
    assert seen[0] != []


def test_a_retry_never_mixes_with_what_an_earlier_attempt_left(trial: Trial) -> None:
    with trial.sender() as sender:
        trial.store.delete = lambda keys: None  # what failed cannot be cleaned up
        failing_puts(trial, SEGMENT_PREFIX, times=1)
        type(sender).least_segment_bytes, before = 1, sender.least_segment_bytes
        try:
            with pytest.raises(StoreUnavailable):
                sender.publish(save(changed(trial.states[-1], 7, 0.2), trial.root / "lost", shards=2))
            report = trial.publish(sender)
        finally:
            type(sender).least_segment_bytes = before
    committed = read_manifest(trial.store, report.version)[0]
    attempts = {place_of(k).folder for k in trial.listed(f"{SEGMENT_PREFIX}{report.version:012d}/")}
    assert committed.attempt in attempts
    trial.receiver("one").pull()
    trial.assert_holds(report.version)


def test_a_delta_is_never_taken_for_a_full_checkpoint(trial: Trial) -> None:
    trial.run(2)
    manifest = read_manifest(trial.store, 2)[0]
    assert (manifest.kind, manifest.parent.version) == ("delta", 1)
    assert manifest.state_before == read_manifest(trial.store, 1)[0].state_after
    run, start = load_run(trial.store)
    trial.receiver("one").pull(to_version=0)
    mirror = DirectoryMirror.open(trial.root / "one", run)
    replay = Replay(trial.store, run, start, mirror, decoders=HERE, fetchers=HERE)
    target = start.model_copy(update={"version": 2, "state": manifest.state_after})
    with pytest.raises((WrongBase, CorruptObject)):
        replay.apply(manifest, target, 0)
    mirror.close()
    trial.assert_holds(0)


def test_a_resume_over_a_pruned_chain_is_refused_not_guessed(trial: Trial) -> None:
    trial.run(4)
    trial.receiver("one").pull(to_version=1)
    trial.store.delete(trial.listed("segments/000000000002/"))
    with pytest.raises(ChainBroken):
        trial.receiver("one").pull()
    trial.assert_holds(1)


def test_what_is_deleted_while_a_reader_loads_it_leads_to_another_way(trial: Trial) -> None:
    trial.run(6)
    trial.receiver("late").pull(to_version=0)
    with trial.sender(fence=False) as sender:
        sender.snapshot()
    read = trial.store.read_into
    deleted: list[str] = []

    def deleting(key: str, start: int, buffer: memoryview) -> None:
        if key.startswith("segments/000000000003/") and not deleted:
            deleted.extend(trial.listed("segments/000000000003/"))
            trial.store.delete(deleted)
        read(key, start, buffer)

    trial.store.read_into = deleting
    run, start = load_run(trial.store)
    mirror = DirectoryMirror.open(trial.root / "late", run)
    replay = Replay(trial.store, run, start, mirror, decoders=HERE, fetchers=HERE)
    steps = [replay.catch_up(to_version=2), replay.catch_up()]
    kinds = [applied.kind for step in steps for applied in step]
    mirror.flush()
    mirror.close()
    assert kinds[:2] == ["delta", "delta"]
    assert "snapshot" in kinds
    trial.assert_holds(6, "late")


def test_a_replicated_tensor_is_taken_once_and_its_copies_must_agree() -> None:
    tied = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    store = MemoryStore()
    with Sender.open(store, base={"embed": tied, "head": tied, "other": torch.zeros(2)}, workers=0) as sender:
        assert [(t.name, t.aliases) for t in sender.run.tensors] == [("embed", ("head",)), ("other", ())]
        new = tied + 1
        with sender.version() as version:
            version.add("embed", new)
            version.add("head", new.clone())
            version.add("other", torch.zeros(2))
        with pytest.raises(BadInput, match="ties it to embed, but their bits differ"), sender.version() as version:
            version.add("embed", new)
            version.add("head", new + 1)
        with pytest.raises(BadInput, match="added twice"), sender.version() as version:
            version.add("other", torch.zeros(2))
            version.add("other", torch.zeros(2))


def test_unknown_and_missing_names_are_refused_not_skipped(trial: Trial) -> None:
    with trial.sender() as sender:
        extra = {**trial.states[-1], "stranger": trial.states[-1]["embed"]}
        with pytest.raises(BadInput, match="tensor stranger: unknown"):
            sender.publish(save(extra, trial.root / "extra", shards=2))
        fewer = {k: v for k, v in trial.states[-1].items() if k != "embed"}
        with pytest.raises(BadInput, match="embed not added"):
            sender.publish(save(fewer, trial.root / "fewer", shards=2))
        trial.publish(sender)
    trial.receiver("one").pull()
    trial.assert_holds(2)


def test_tied_weights_stored_twice_in_a_directory_both_get_the_change(tmp_path: Any) -> None:
    first = make_state(3)
    store = MemoryStore()
    tensors = {"embed": torch.zeros(4, dtype=torch.bfloat16), "x": torch.ones(3)}
    tensors["head"] = tensors["embed"]
    (tmp_path / "both").mkdir()
    bits = {"embed": first["embed"], "head": first["embed"], "x": first["layer.0.norm"]}
    write_safetensors(tmp_path / "both" / "model.safetensors", bits)
    base = {
        "embed": torch.from_numpy(first["embed"].cells.view("<i2").copy()).view(torch.bfloat16).reshape(40, 16),
        "x": torch.from_numpy(first["layer.0.norm"].cells.view("<i4").copy()).view(torch.float32),
    }
    base["head"] = base["embed"]
    with Sender.open(store, base=base, workers=0) as sender:
        new = {**base, "embed": base["embed"].clone()}
        new["embed"].view(torch.int16)[3, 3] ^= 5
        new["head"] = new["embed"]
        sender.publish(new)
    receiver = Receiver(store, tmp_path / "mirror", base=tmp_path / "both", workers=0)
    receiver.pull()
    from safetensors.torch import load_file

    held = load_file(tmp_path / "mirror" / "model.safetensors")
    for name in ("embed", "head"):
        assert torch.equal(held[name].view(torch.int16), new["embed"].view(torch.int16))


def test_work_grows_with_what_changed_and_a_cold_start_does_not_replay_history(trial: Trial) -> None:
    with trial.sender(fence=False) as sender:
        for _ in range(20):
            trial.publish(sender)
        sender.snapshot()
    metered = MeteredStore(trial.store)
    receiver = trial.receiver("new", base=None)
    receiver._url = metered
    report = receiver.pull()
    assert report.from_version == 20
    assert len(trial.listed(SEGMENT_PREFIX)) == 20
    assert metered.meter.traffic.requests["read"] < 20
    trial.assert_holds(20, "new")


def test_bits_that_no_longer_are_the_version_are_found_and_named(trial: Trial) -> None:
    trial.run(1)
    trial.receiver("one").pull()
    file = max((trial.root / "one").glob("*.safetensors"))
    body = bytearray(file.read_bytes())
    body[-1] ^= 1
    file.write_bytes(body)
    with pytest.raises(StateMismatch, match="does not hold the committed bits"):
        verify_directory(trial.store, trial.root / "one", workers=0)


def test_a_reused_address_never_mixes_two_runs(trial: Trial, tmp_path: Any) -> None:
    trial.run(2)
    trial.receiver("one").pull()
    with pytest.raises(RunExists, match="another base"):
        init_run(trial.store, save(make_state(9), tmp_path / "other"), state_dir=tmp_path / "s", workers=0)
    other = Manifest.from_bytes(trial.bucket.objects[manifest_key(2)].body, where="")
    trial.store.put(manifest_key(3), other.model_copy(update={"run_id": "f" * 32}).to_bytes())
    with pytest.raises((ChainBroken, CorruptObject)):
        trial.receiver("one").pull()
    trial.assert_holds(2)
