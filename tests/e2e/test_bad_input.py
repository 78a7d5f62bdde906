"""Bad input from the command line: the message names the culprit, the exit code says what to do, nothing is lost."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcr_s3.cli.demo.bits import differing_tensors
from dcr_s3.store import open_store
from dcr_s3.testing.servers import EmbeddedS3, SeaweedServer

Cli = Callable[..., Any]
MakeCheckpoint = Callable[..., Path]
Published = tuple[str, Path, Path]
"""A run's address, its base, and a mirror at version 0; version 1 is published and not pulled."""


def require_failure(outcome: Any, error: str, *names: str) -> None:
    assert outcome.data["error"] == error
    for name in names:
        assert name in outcome.data["message"]
    assert "Traceback" not in outcome.err


@pytest.fixture
def published(cli: Cli, make_checkpoint: MakeCheckpoint, tmp_path: Path) -> Published:
    url, base, mirror = f"memory://{tmp_path.name}/run", make_checkpoint(0), tmp_path / "mirror"
    cli("init", url, "--base", base)
    cli("pull", url, mirror, "--base", base)
    cli("publish", url, make_checkpoint(1))
    return url, base, mirror


def rewrite(url: str, key: str, change: Callable[[bytearray], bytearray]) -> bytes:
    """Alters one object of a bucket behind everyone's back; returns what it was."""
    store = open_store(url)
    found = store.get(key, limit_bytes=1 << 30)
    assert found is not None
    store.put(key, change(bytearray(found.body)))
    return found.body


def only_key(url: str, prefix: str) -> str:
    (info,) = open_store(url).list(prefix)
    return info.key


def flip_middle_bit(body: bytearray) -> bytearray:
    body[len(body) // 2] ^= 1
    return body


def cut_in_half(body: bytearray) -> bytearray:
    return body[: len(body) // 2]


@pytest.mark.parametrize("url", ["not-a-url", "http://bucket/run", "s3://", "s3:/bucket/run"])
def test_an_address_that_is_none(cli: Cli, tmp_path: Path, url: str) -> None:
    done = cli("pull", url, tmp_path / "mirror", "--json", code=12)
    require_failure(done, "BadInput", "s3://")


def test_credentials_in_the_address_are_refused_and_not_repeated(cli: Cli, tmp_path: Path) -> None:
    done = cli("pull", "s3://name:hush-hush@bucket/run", tmp_path / "mirror", "--json", "-v", code=12)
    require_failure(done, "BadInput", "credentials")
    assert "hush-hush" not in done.out + done.err


def test_no_run_at_the_address(cli: Cli, make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/elsewhere"
    for command in (("pull", url, tmp_path / "mirror"), ("publish", url, make_checkpoint(1)), ("status", url)):
        require_failure(cli(*command, "--json", code=12), "RunMissing", url)


def test_the_bucket_is_missing(
    cli: Cli, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with EmbeddedS3() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        base = make_checkpoint(0)
        url = "s3://there-is-no-such-bucket/run"
        require_failure(cli("init", url, "--base", base, "--json", code=12), "BucketMissing", "there-is-no-such-bucket")
        require_failure(cli("pull", url, tmp_path / "m", "--json", code=12), "BucketMissing", "there-is-no-such-bucket")


def test_the_bucket_is_forbidden(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with SeaweedServer() as server:
        server.create_bucket("private")
        for name, value in {**server.environment, "AWS_SECRET_ACCESS_KEY": "a-wrong-secret"}.items():
            monkeypatch.setenv(name, value)
        done = cli("pull", "s3://private/run", tmp_path / "m", "--json", code=12)
        require_failure(done, "Forbidden", "private")
        assert "a-wrong-secret" not in done.err + done.out


def test_the_store_does_not_answer(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with EmbeddedS3() as server:
        environment = server.environment
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    require_failure(cli("pull", "s3://bucket/run", tmp_path / "m", "--json", code=10), "StoreUnavailable")


def test_the_address_holds_a_run_with_another_base(
    cli: Cli, make_checkpoint: MakeCheckpoint, published: Published
) -> None:
    url, _, _ = published
    before = cli("status", url, "--json").data
    require_failure(cli("init", url, "--base", make_checkpoint(1, "other"), "--json", code=12), "RunExists", url)
    assert cli("status", url, "--json").data == before


def test_a_base_that_differs_in_one_bit(cli: Cli, published: Published, tmp_path: Path) -> None:
    url, base, _ = published
    wrong = tmp_path / "wrong"
    shutil.copytree(base, wrong)
    shard = wrong / "model-00002-of-00003.safetensors"
    shard.write_bytes(flip_middle_bit(bytearray(shard.read_bytes())))
    (tensor,) = differing_tensors(base, wrong)
    require_failure(cli("pull", url, tmp_path / "new", "--base", wrong, "--json", code=12), "BadInput", tensor)
    require_failure(cli("pull", url, wrong, "--json", code=12), "BadInput", tensor)


@pytest.mark.parametrize("prefix", ["segments/", "manifests/"])
@pytest.mark.parametrize("damage", [flip_middle_bit, cut_in_half])
def test_a_damaged_object(
    cli: Cli, published: Published, tmp_path: Path, damage: Callable[[bytearray], bytearray], prefix: str
) -> None:
    url, base, mirror = published
    key = only_key(url, prefix)
    intact = rewrite(url, key, damage)
    require_failure(cli("pull", url, mirror, "--json", code=13), "CorruptObject", key)
    assert differing_tensors(base, mirror) == []
    rewrite(url, key, lambda _: bytearray(intact))
    cli("pull", url, mirror)
    assert differing_tensors(tmp_path / "version-1", mirror) == []


def test_a_segment_that_is_gone(cli: Cli, published: Published) -> None:
    url, base, mirror = published
    key = only_key(url, "segments/")
    open_store(url).delete([key])
    require_failure(cli("pull", url, mirror, "--json", code=11), "ChainBroken", key)
    require_failure(cli("inspect", url, "--json", code=13), "CorruptObject", key)
    assert differing_tensors(base, mirror) == []


def test_a_manifest_of_a_newer_format(cli: Cli, published: Published) -> None:
    url, base, mirror = published
    key = only_key(url, "manifests/")

    def newer(body: bytearray) -> bytearray:
        document = json.loads(body)
        document["format"]["major"] += 1
        return bytearray(json.dumps(document).encode())

    rewrite(url, key, newer)
    for command in (("pull", url, mirror), ("status", url), ("inspect", url)):
        require_failure(cli(*command, "--json", code=12), "UnsupportedFormat", key)
    assert differing_tensors(base, mirror) == []


def test_a_checkpoint_with_a_missing_shard(cli: Cli, make_checkpoint: MakeCheckpoint, published: Published) -> None:
    url, _, _ = published
    broken = make_checkpoint(2)
    (broken / "model-00002-of-00003.safetensors").unlink()
    before = cli("status", url, "--json").data
    require_failure(cli("publish", url, broken, "--json", code=12), "BadInput", "model-00002-of-00003.safetensors")
    assert cli("status", url, "--json").data == before


def test_a_checkpoint_with_other_tensors(cli: Cli, make_checkpoint: MakeCheckpoint, published: Published) -> None:
    url, _, _ = published
    fewer = make_checkpoint(2)
    (fewer / "model-00002-of-00003.safetensors").unlink()
    (fewer / "model.safetensors.index.json").unlink()
    require_failure(cli("publish", url, fewer, "--json", code=12), "BadInput", "model.layers.0.router.bias")


def test_a_directory_that_is_no_checkpoint(cli: Cli, published: Published, tmp_path: Path) -> None:
    url, _, _ = published
    (tmp_path / "empty").mkdir()
    for directory in (tmp_path / "empty", tmp_path / "there-is-none"):
        require_failure(cli("publish", url, directory, "--json", code=12), "BadInput", str(directory))


def test_a_disk_that_fills_up(cli: Cli, published: Published, tmp_path: Path) -> None:
    url, base, mirror = published
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))  # the kernel refuses to let any file grow beyond it
    try:
        require_failure(cli("pull", url, mirror, "--json", code=12), "DiskFull", str(mirror))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert differing_tensors(base, mirror) == []
    cli("pull", url, mirror)
    assert differing_tensors(tmp_path / "version-1", mirror) == []


def test_an_unexpected_failure_shows_a_traceback_only_when_asked(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*arguments: object, **settings: object) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr("dcr_s3.overview.load_run", broken)
    done = cli("status", f"memory://{tmp_path.name}/run", "--json", code=1)
    require_failure(done, "RuntimeError", "broken on purpose")
    assert "Traceback" in cli("status", f"memory://{tmp_path.name}/run", "-v", code=1).err


def test_a_pull_from_a_wrong_base_may_be_repeated_with_the_right_one(
    cli: Cli, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    url = f"memory://{tmp_path.name}/run"
    base = make_checkpoint(0)
    cli("init", url, "--base", base)
    wrong = shutil.copytree(base, tmp_path / "wrong")
    shard = wrong / "model-00002-of-00003.safetensors"
    body = bytearray(shard.read_bytes())
    body[len(body) // 2] ^= 1
    shard.write_bytes(body)
    cli("pull", url, tmp_path / "new", "--base", wrong, code=12)
    cli("pull", url, tmp_path / "new", "--base", base)
    assert differing_tensors(base, tmp_path / "new") == []
