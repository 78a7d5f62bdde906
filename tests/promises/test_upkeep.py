"""Upkeep: snapshots and folds from a mirror directory, once they are worth it; the same from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dcr_s3.cli.app import run
from dcr_s3.errors import BadInput
from dcr_s3.store import open_store
from dcr_s3.testing.checkpoints import changed
from dcr_s3.upkeep import make_fold, make_snapshot

Trial = Any


def test_a_snapshot_is_made_once_the_chain_beside_the_last_one_is_long(trial: Trial) -> None:
    trial.run(2)
    trial.receiver("mirror").pull(to_version=1)
    first = make_snapshot(trial.store, trial.root / "mirror", if_worth=0.5, workers=0)
    assert (first.made, first.version, first.beyond_bytes) == (True, 1, None)
    trial.receiver("mirror").pull()
    second = make_snapshot(trial.store, trial.root / "mirror", if_worth=2.0, workers=0)
    assert (second.made, second.version) == (False, 2)
    assert 0 < second.beyond_bytes <= 2.0 * second.dense_bytes
    share = second.beyond_bytes / second.dense_bytes
    assert make_snapshot(trial.store, trial.root / "mirror", if_worth=share * 0.99, workers=0).made
    assert not make_snapshot(trial.store, trial.root / "mirror", workers=0).made


def test_a_fold_is_made_once_the_versions_in_between_are_worth_it(trial: Trial) -> None:
    trial.run(3)
    trial.receiver("mirror").pull(to_version=0)
    waiting = make_fold(trial.store, trial.root / "mirror", if_worth=100.0, workers=0)
    assert (waiting.made, waiting.first, waiting.last) == (False, 0, 0)
    assert waiting.chain_bytes > 0
    made = make_fold(trial.store, trial.root / "mirror", if_worth=0.01, workers=0)
    assert (made.made, made.first, made.last) == (True, 0, 3)
    trial.assert_holds(3, "mirror")
    assert make_fold(trial.store, trial.root / "mirror", if_worth=0.0, workers=0).made is False


def test_a_directory_that_is_no_mirror_makes_no_snapshot(trial: Trial) -> None:
    trial.run(1)
    (trial.root / "empty").mkdir()
    with pytest.raises(BadInput, match="empty"):
        make_snapshot(trial.store, trial.root / "empty", workers=0)


def test_a_sender_with_its_baseline_in_memory_makes_a_snapshot(trial: Trial) -> None:
    import torch

    from dcr_s3 import Receiver, Sender

    state = {"a": torch.arange(64, dtype=torch.bfloat16), "b": torch.ones(3, 5)}
    with Sender.open(trial.store, base=state, workers=0) as sender:
        state["a"][7] += 1
        sender.publish(state)
        made = sender.snapshot()
    assert [f.name for f in made.files] == ["model.safetensors"]
    report = Receiver(trial.store, trial.root / "new", workers=0).pull()
    assert (report.from_version, report.version) == (2, 2)
    from safetensors.torch import load_file

    loaded = load_file(trial.root / "new" / "model.safetensors")
    assert torch.equal(loaded["a"], state["a"])
    assert torch.equal(loaded["b"], state["b"])


def test_upkeep_from_the_command_line(
    trial: Trial, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCR_STATE_DIR", str(tmp_path / "cli-state"))
    url = f"memory://{tmp_path.name}/run"
    trial.store = open_store(url)
    with trial.sender(fence=False) as sender:
        for number in range(5):
            trial.publish(sender, changed(trial.states[-1], number, 0.05))
    mirror = str(tmp_path / "mirror")

    def call(*arguments: str) -> Any:
        capsys.readouterr()
        code = run([*arguments, "--json"])
        return code, json.loads(capsys.readouterr().out)

    assert run(["pull", url, mirror, "--base", str(tmp_path / "base"), "--version", "1", "--quiet"]) == 0
    assert call("fold", url, mirror)[1]["last"] == 5
    assert call("fold", url, mirror, "--if-worth", "0.1") == (0, call("fold", url, mirror, "--if-worth", "0.1")[1])
    assert call("snapshot", url, mirror)[1]["made"]
    code, shown = call("gc", url, "--min-age", "0", "--keep-versions", "1")
    assert (code, shown["deleted"]) == (0, False)
    assert {o["key"].split("/")[1] for o in shown["objects"] if o["key"].startswith("segments/")} >= {"000000000002"}
    assert call("gc", url, "--min-age", "0", "--keep-versions", "1", "--delete")[1]["deleted"]
    assert run(["pull", url, str(tmp_path / "new"), "--quiet"]) == 0
    trial.assert_holds(5, "new")
    assert run(["gc", url, "--quiet"]) == 0
    code, failed = call("wait", url, "5", "--receiver", "absent", "--timeout", "0")
    assert (code, failed["error"]) == (10, "NotAcknowledged")
    assert "absent" in failed["message"]
    names = call("wait", url, "5", "--timeout", "0")
    assert names[0] == 10  # the mirror that was folded with never acknowledged version 5
    held = call("gc", url)[1]["held"]
    late = next(name for name, version in held.items() if version < 5)
    assert run(["leave", url, late]) == 0
    assert call("wait", url, "5", "--timeout", "0")[0] == 0
    careful = str(tmp_path / "careful")
    assert call("pull", url, careful, "--released-only", "--version", "5")[1]["error"] == "NotAcknowledged"
    assert call("release", url, "5")[1]["version"] == 5
    assert call("pull", url, careful, "--released-only")[1]["version"] == 5
    assert call("follow", url, careful, "--released-only", "--until-version", "5")[0] == 0
    assert call("release", url, "9")[0] == 12


@pytest.mark.parametrize("workers", [0, 2])
def test_a_large_snapshot_travels_in_parts_and_a_failed_one_leaves_nothing_open(tmp_path: Path, workers: int) -> None:
    import torch

    from dcr_s3 import Receiver, Sender
    from dcr_s3.errors import StoreUnavailable
    from dcr_s3.store.memory import MemoryBucket, MemoryStore, MemoryUpload

    state = {"small": torch.ones(3), "large": torch.arange(11_000_000, dtype=torch.int32).to(torch.bfloat16)}
    bucket = MemoryBucket()
    with Sender.open(MemoryStore(bucket), base=state, workers=workers) as sender:
        upload_part = MemoryUpload.upload_part

        def failing(upload: MemoryUpload, number: int, body: bytearray) -> None:
            if number == 2:
                raise StoreUnavailable("503 SlowDown")
            upload_part(upload, number, body)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MemoryUpload, "upload_part", failing)
            with pytest.raises(StoreUnavailable):
                sender.snapshot()
        assert bucket.uploads == {}
        made = sender.snapshot()
    assert [f.size_bytes > 16 << 20 for f in made.files] == [True]
    Receiver(MemoryStore(bucket), tmp_path / "new", workers=workers).pull()
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "new" / "model.safetensors")["large"], state["large"])
