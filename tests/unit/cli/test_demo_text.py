"""The demonstration's text and reward."""

from __future__ import annotations

from dcr_s3.cli.demo.text import corpus, reward, vocabulary


def test_the_corpus_is_ascii_prose_of_the_size_asked_for() -> None:
    text = corpus(limit_bytes=50_000)
    assert len(text) == 50_000
    assert max(text) < 128
    assert {b"the", b"is", b"object"} <= vocabulary(text)


def test_vocabulary_has_words_that_stand_often_enough() -> None:
    assert vocabulary(b"spam Spam SPAM eggs eggs a a a a") == {b"spam"}


def test_reward_is_the_share_of_bytes_in_whole_known_words() -> None:
    words = frozenset({b"spam", b"egg"})
    assert reward(b"spam egg xx ", words) == 7 / 12
    assert reward(b"spamegg spam", words) == 0.0
    assert reward(b"", words) == 0.0
