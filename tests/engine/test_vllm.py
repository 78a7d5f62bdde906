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


def test_two_ranks_hold_the_version_and_fetch_only_their_part(engine_script: Run, moto_url: str) -> None:
    (result,) = engine_script("tensor_parallel.py", moto_url)
    for version in result["versions"]:
        assert version["served"] == str(version["version"])
        assert version["tokens_moved"]
        assert max(version["shares"]) < 0.6
    assert result["checksums_agree"]
    assert result["tokens_agree"]
    assert "digests add up" in result["planted"]


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


def test_plain_transformers_models_follow(engine_script: Run) -> None:
    results = engine_script("transformers_module.py")
    assert len(results) == 3
    for result in results:
        assert result["routes"]["dense"] == result["routes"]["skipped"] == 0
        assert result["same"] == [[True, True, True]] * 2
