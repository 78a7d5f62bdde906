"""A real vLLM follows runs: after every version it holds the bits of a fresh engine and says the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., list[dict[str, Any]]]


@pytest.mark.parametrize("names", [("qwen3_moe", "mixtral"), ("llama", "qwen2", "qwen3")], ids=["experts", "dense"])
def test_bits_and_tokens_are_those_of_a_fresh_engine(engine_script: Run, names: tuple[str, ...]) -> None:
    results = engine_script("inprocess.py", *names)
    assert [r["model"] for r in results] == list(names)
    for result in results:
        assert result["routes"]["planned"] > 0
        assert result["routes"]["skipped"] == 0
        assert result["in_place"]
        assert len(result["versions"]) == 2
        for version in result["versions"]:
            assert version["served"] == version["version"]
            assert version["different"] == []
            assert version["same_names"]
            assert version["tokens_agree"]
            assert version["tokens_moved"]


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_two_ranks_hold_the_version_and_fetch_only_their_part(kind: str, engine_script: Run, moto_url: str) -> None:
    (result,) = engine_script("ranks.py", moto_url, kind)
    assert [v["kind"] for v in result["versions"]] == ["delta", "delta", "snapshot"]
    for version in result["versions"]:
        assert version["served"] == str(version["version"])
        assert version["acknowledged"] == ["engine"]
        assert version["tokens_moved"] == (kind == "tensor")
        # The blocks of so small a model reach over its layers, which both stages need.
        assert kind == "pipeline" or version["kind"] == "snapshot" or max(version["shares"]) < 0.6
    assert result["checksums_agree"]
    assert result["tokens_agree"]
    assert "digests add up" in result["planted"]
    held_elsewhere = [routes["skipped"] for routes in result["routes"]]
    assert all(held_elsewhere) == any(held_elsewhere) == (kind == "pipeline")


def test_an_async_engine_follows_by_the_worker_extension_with_requests_running(
    engine_script: Run, moto_url: str
) -> None:
    (result,) = engine_script("async_engine.py", moto_url)
    for version in result["versions"]:
        assert version["served"] == str(version["version"])
        assert version["tokens_moved"]
        assert not version["paused"]
        if version["pause_mode"] == "abort":
            assert version["ends"] == ["abort"]
        else:
            assert version["ends"] == ["length"]
            assert version["lengths"] == [100, 100, 100]
    assert result["checksums_agree"]
    assert result["tokens_agree"]


def test_a_server_with_requests_running_follows_without_a_wrong_answer(engine_script: Run, moto_url: str) -> None:
    (result,) = engine_script("server.py", moto_url)
    assert result["follower_code"] == 0
    assert result["answers"] > 10
    assert result["failures"] == []
    assert result["wrong"] == []
    assert result["versions_differ"]
    assert result["version"] == str(result["followed"]["version"]) == str(result["proof"]["version"])
    assert not result["paused"]
    assert result["bound"]["routes"][0]["planned"] == len(result["bound"]["ranks"][0])
    assert result["tokens_agree"]
    assert result["checksums_agree"]


LAYERS = "model.layers"


def test_what_is_planted_in_an_engine_is_caught_by_name_and_ends_as_defined(engine_script: Run) -> None:
    (result,) = engine_script("planted.py")
    for plant, tensor in (("alias", f"{LAYERS}.1.mlp.down_proj.weight"), ("moved", "model.norm.weight")):
        for kind, text in result[plant]["raised"]:
            assert kind == "StateMismatch"
            assert f"engine tensor {tensor}: its storage moved" in text
    pulled, proved = result["repacked"]["raised"]
    assert pulled[0] == "WrongBase"
    assert proved[0] == "StateMismatch"
    for part in "qkv":
        assert all(f"{LAYERS}.0.self_attn.{part}_proj.weight" in text for _, text in (pulled, proved))
    ((kind, text),) = result["stale"]["raised"]
    assert kind == "StateMismatch"
    assert "in tensor model.norm.weight:" in text
    for plant in ("alias", "moved", "repacked", "stale"):
        assert result[plant]["gate"] == []
    for plant, kind, text in (
        ("missed", "StateMismatch", "engine tensor model.norm.weight: does not hold what was written to it"),
        ("interrupted", "RuntimeError", "planted"),
        ("expired", "ApplyExpired", "was put back"),
    ):
        failed, proved = result[plant]["raised"]
        assert failed[0] == kind
        assert text in failed[1]
        assert proved == ["", ""]
        assert result[plant]["gate"] == ["close", "open"]
        assert result[plant]["as_before"]
    assert result["equals_fresh"]
    assert result["tokens_agree"]
    assert result["unfit"]["gate"] == ["close"]
    assert [kind for kind, _ in result["unfit"]["raised"] + result["closed"]["raised"]] == ["ReplicaUnfit"] * 3


def test_other_layouts_follow_and_packed_weights_are_refused_by_name(engine_script: Run) -> None:
    followed, refused = ("llama4", "granitemoe", "gpt_oss", "deepseek"), ("int8_channels", "fp8_channels")
    results = engine_script("layouts.py", *followed, *refused)
    assert [r["checkpoint"] for r in results] == [*followed, *refused]
    for result in results[: len(followed)]:
        assert result["routes"]["dense"] > 0
        assert result["routes"]["planned"] > 0
        assert result["routes"]["skipped"] == 0
        for version in result["versions"]:
            assert version["different"] == []
            assert version["tokens_agree"]
    for result in results[len(followed) :]:
        assert "tensor model.layers.0.mlp.down_proj.weight: the engine's loader does not take it" in result["refused"]
        assert result["untouched"]


def test_plain_transformers_models_follow(engine_script: Run) -> None:
    results = engine_script("transformers_module.py")
    assert len(results) == 3
    for result in results:
        assert result["routes"]["dense"] == result["routes"]["skipped"] == 0
        assert result["same"] == [[True, True, True]] * 2
