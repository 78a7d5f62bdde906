"""The main job from the command line: init, publish, pull, follow, verify, status, inspect."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcr_s3.cli.demo.bits import differing_tensors

Cli = Callable[..., Any]
MakeCheckpoint = Callable[..., Path]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}/run"


def test_every_version_arrives_bit_for_bit(cli: Cli, make_checkpoint: MakeCheckpoint, tmp_path: Path, url: str) -> None:
    base, mirror = make_checkpoint(0), tmp_path / "mirror"
    made = cli("init", url, "--base", base, "--json")
    assert made.data["tensors"] == 9
    for version in (1, 2, 3):
        checkpoint = make_checkpoint(version)
        sent = cli("publish", url, checkpoint, "--step", 10 * version, "--json")
        got = cli("pull", url, mirror, "--base", base, "--json")
        for report in (sent.data, got.data):
            assert report["version"] == version
            assert report["step"] == 10 * version
            assert 0 < report["changed_elements"] < report["total_elements"] == made.data["total_elements"]
            assert 0 < report["wire_bytes"] < report["dense_bytes"] == made.data["dense_bytes"]
            assert report["seconds"]["total"] > 0
        assert sent.data["changed_elements"] == got.data["changed_elements"]
        assert sent.data["wire_bytes"] == got.data["wire_bytes"]
        assert differing_tensors(checkpoint, mirror) == []
    assert (mirror / "config.json").read_bytes() == (base / "config.json").read_bytes()
    assert json.loads((mirror / "dcr_state.json").read_bytes())["version"] == 3


def test_a_late_mirror_catches_up_over_several_versions(
    cli: Cli, make_checkpoint: MakeCheckpoint, tmp_path: Path, url: str
) -> None:
    cli("init", url, "--base", make_checkpoint(0), "--upload-base")
    for version in (1, 2, 3):
        cli("publish", url, make_checkpoint(version))
    to_two = cli("pull", url, tmp_path / "mirror", "--version", 2, "--json").data
    assert (to_two["from_version"], to_two["version"]) == (0, 2)
    assert differing_tensors(tmp_path / "version-2", tmp_path / "mirror") == []
    to_three = cli("pull", url, tmp_path / "mirror", "--json").data
    assert (to_three["from_version"], to_three["version"]) == (2, 3)
    assert differing_tensors(tmp_path / "version-3", tmp_path / "mirror") == []


def test_nothing_new_is_no_failure(cli: Cli, make_checkpoint: MakeCheckpoint, tmp_path: Path, url: str) -> None:
    base = make_checkpoint(0)
    cli("init", url, "--base", base)
    cli("pull", url, tmp_path / "mirror", "--base", base, "--json")
    again = cli("pull", url, tmp_path / "mirror", "--json")
    assert again.data["up_to_date"] is True
    assert (again.data["version"], again.data["changed_elements"]) == (0, 0)
    assert "nothing new" in cli("pull", url, tmp_path / "mirror").out


def test_init_again_with_the_same_base_changes_nothing(cli: Cli, make_checkpoint: MakeCheckpoint, url: str) -> None:
    base = make_checkpoint(0)
    first, second = cli("init", url, "--base", base, "--json"), cli("init", url, "--base", base, "--json")
    assert first.data == second.data


def test_publish_without_a_run_makes_one_from_the_base(
    cli: Cli, make_checkpoint: MakeCheckpoint, tmp_path: Path, url: str
) -> None:
    base = make_checkpoint(0)
    assert cli("publish", url, make_checkpoint(1), "--base", base, "--json").data["version"] == 1
    cli("pull", url, tmp_path / "mirror", "--base", base)
    assert differing_tensors(tmp_path / "version-1", tmp_path / "mirror") == []


def test_an_unchanged_checkpoint_is_a_tiny_version(cli: Cli, make_checkpoint: MakeCheckpoint, url: str) -> None:
    base = make_checkpoint(0)
    cli("init", url, "--base", base)
    report = cli("publish", url, base, "--json").data
    assert (report["version"], report["changed_elements"], report["segments"]) == (1, 0, 0)
    assert report["wire_bytes"] < 2000


def test_context_free_runs_are_exact_too(cli: Cli, make_checkpoint: MakeCheckpoint, tmp_path: Path, url: str) -> None:
    base = make_checkpoint(0)
    assert cli("init", url, "--base", base, "--context-free", "--json").data["coding"] == "context-free"
    cli("publish", url, make_checkpoint(1))
    cli("pull", url, tmp_path / "mirror", "--base", base)
    assert differing_tensors(tmp_path / "version-1", tmp_path / "mirror") == []
    assert not [c for c in cli("inspect", url, "--json").data["codings"] if c["coding"] == "clock-context"]


def test_matrices_are_cut_for_ranks_that_hold_parts(
    cli: Cli, make_checkpoint: MakeCheckpoint, tmp_path: Path, url: str
) -> None:
    base, new = make_checkpoint(0), make_checkpoint(1)
    blocks = []
    for parts in (1, 2):
        run, mirror = f"{url}/{parts}", tmp_path / f"mirror-{parts}"
        cli("init", run, "--base", base, "--context-free")
        cli("publish", run, new, "--parts", parts)
        blocks.append(sum(c["blocks"] for c in cli("inspect", run, "--json").data["codings"]))
        cli("pull", run, mirror, "--base", base)
        assert differing_tensors(new, mirror) == []
    assert blocks[1] > blocks[0]


def test_follow_ends_at_the_version_asked_for(
    cli: Cli, make_checkpoint: MakeCheckpoint, tmp_path: Path, url: str
) -> None:
    base = make_checkpoint(0)
    cli("init", url, "--base", base)
    for version in (1, 2):
        cli("publish", url, make_checkpoint(version))
    followed = cli("follow", url, tmp_path / "mirror", "--base", base, "--until-version", 2, "--json")
    assert followed.data["version"] == followed.data["last"]["version"] == 2
    assert followed.data["wire_bytes"] > 0
    assert "pulled version 2" in followed.err
    assert differing_tensors(tmp_path / "version-2", tmp_path / "mirror") == []


def test_verify_proves_a_mirror_and_names_what_was_altered(
    cli: Cli, make_checkpoint: MakeCheckpoint, tmp_path: Path, url: str
) -> None:
    base, mirror = make_checkpoint(0), tmp_path / "mirror"
    cli("init", url, "--base", base)
    cli("publish", url, make_checkpoint(1))
    cli("pull", url, mirror, "--base", base)
    proved = cli("verify", url, mirror, "--json")
    assert (proved.data["version"], proved.data["tensors"]) == (1, 9)
    flip_last_byte(mirror / "model-00002-of-00003.safetensors")
    altered = cli("verify", url, mirror, "--json", code=13)
    assert altered.data["exit_code"] == 13
    assert altered.data["error"] == "StateMismatch"
    named = [name for name in SECOND_SHARD if name in altered.data["message"]]
    assert len(named) == 1


SECOND_SHARD = ("mlp.down_proj.weight", "router.bias", "router.counts")


def flip_last_byte(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)


def test_status_shows_versions_and_receivers(
    cli: Cli, make_checkpoint: MakeCheckpoint, tmp_path: Path, url: str
) -> None:
    base = make_checkpoint(0)
    cli("init", url, "--base", base, "--upload-base")
    cli("publish", url, make_checkpoint(1), "--step", 7)
    cli("pull", url, tmp_path / "mirror")
    sent = cli("publish", url, make_checkpoint(2), "--step", 8, "--json").data
    found = cli("status", url, "--json").data
    assert (found["version"], found["snapshots"]) == (2, [0])
    assert [v["step"] for v in found["versions"]] == [7, 8]
    assert found["versions"][1]["wire_bytes"] == sent["wire_bytes"]
    assert [(r["version"], r["lag"], r["matches"]) for r in found["receivers"]] == [(1, 1, True)]
    assert len(cli("status", url, "--last", 1, "--json").data["versions"]) == 1
    shown = cli("status", url).out
    assert "version 2 is the newest" in shown
    assert "receivers" in shown


def test_status_shows_folds_the_release_and_leases(
    cli: Cli, make_checkpoint: MakeCheckpoint, tmp_path: Path, url: str
) -> None:
    base = make_checkpoint(0)
    cli("init", url, "--base", base)
    assert cli("status", url, "--json").data["release"] is None
    cli("fold", url, tmp_path / "keep", "--base", base)
    for version in (1, 2):
        cli("publish", url, make_checkpoint(version), "--step", 6 + version)
    cli("fold", url, tmp_path / "keep")
    cli("pull", url, tmp_path / "mirror", "--base", base)
    cli("release", url, 2)
    cli("publish", url, make_checkpoint(3), "--step", 9)
    found = cli("status", url, "--json").data
    assert found["folds"] == [[0, 2]]
    (receiver,) = found["receivers"]
    assert (found["release"]["version"], found["release"]["step"], found["release"]["lag"]) == (2, 8, 1)
    assert found["release"]["proved_by"] == [receiver["name"]]
    assert (receiver["lag"], receiver["alive"]) == (1, True)
    assert receiver["lease_until"] > receiver["proved_at"]
    shown = cli("status", url).out
    assert "folds: 0 to 2" in shown
    assert "released: version 2" in shown
    assert "lease until" in shown


def test_inspect_takes_a_version_apart(cli: Cli, make_checkpoint: MakeCheckpoint, url: str) -> None:
    cli("init", url, "--base", make_checkpoint(0))
    for version in (1, 2):
        sent = cli("publish", url, make_checkpoint(version), "--json").data
    found = cli("inspect", url, "--json").data
    assert found == cli("inspect", url, 2, "--json").data
    assert found["version"] == 2
    assert found["changed_elements"] == sent["changed_elements"]
    assert found["changed_elements"] == sum(s["changed_elements"] for s in found["segments"])
    assert found["changed_elements"] == sum(c["changed_elements"] for c in found["codings"])
    assert found["wire_bytes"] == found["manifest_bytes"] + sum(s["size_bytes"] for s in found["segments"])
    assert found["busiest"][0]["changed_elements"] > 0
    assert cli("inspect", url, 1, "--json").data["state_after"] == found["state_before"]
    shown = cli("inspect", url).out
    assert found["segments"][0]["key"] in shown
    assert found["busiest"][0]["first_tensor"] in shown


def test_quiet_prints_nothing_on_success(cli: Cli, make_checkpoint: MakeCheckpoint, tmp_path: Path, url: str) -> None:
    base = make_checkpoint(0)
    for arguments in (
        ("init", url, "--base", base),
        ("publish", url, make_checkpoint(1)),
        ("pull", url, tmp_path / "mirror", "--base", base),
        ("status", url),
    ):
        done = cli(*arguments, "--quiet")
        assert (done.out, done.err) == ("", "")


def test_help_names_every_exit_code(cli: Cli) -> None:
    text = cli("--help").out
    for code in ("0 ", "1 ", "2 ", "10 ", "11 ", "12 ", "13 ", "130", "143"):
        assert code in text


@pytest.mark.parametrize("arguments", [("publish",), ("pull", "--no-such-option"), ("no-such-command",)])
def test_a_wrong_command_line_is_exit_code_2(cli: Cli, arguments: tuple[str, ...]) -> None:
    done = cli(*arguments, "--json", code=2)
    assert done.data["exit_code"] == 2
    assert done.data["error"] == "UsageError"
    assert done.data["message"] in done.err
