"""What a sender says of a commit is proven, or it says that it does not know."""

from __future__ import annotations

from typing import Any

import pytest

from dcr_s3.errors import CommitConflict, DcrError, StoreUnavailable, UnknownOutcome
from dcr_s3.format.keys import MANIFEST_PREFIX, manifest_key
from dcr_s3.sending import commit
from dcr_s3.testing.checkpoints import changed, save

Trial = Any


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "TRIES", 2)


def deafen(trial: Trial, *, applied: bool, readable: bool) -> None:
    """From now on nobody hears of a manifest's creation; ``readable``: but whoever looks for it gets an answer."""
    put, get = trial.store.put, trial.store.get

    def lost(key: str, body: bytes, **condition: Any) -> str:
        if not key.startswith(MANIFEST_PREFIX):
            return put(key, body, **condition)
        if applied:
            put(key, body, **condition)
        raise StoreUnavailable("the connection was closed")

    def unreadable(key: str, **options: Any) -> Any:
        if key.startswith(MANIFEST_PREFIX):
            raise StoreUnavailable("the connection was closed")
        return get(key, **options)

    trial.store.put = lost
    if not readable:
        trial.store.get = unreadable


def hear(trial: Trial) -> None:
    """All as before."""
    del trial.store.put
    trial.store.__dict__.pop("get", None)


def test_a_lost_reply_is_settled_by_reading_back_as_committed(trial: Trial) -> None:
    with trial.sender(fence=False) as sender:
        deafen(trial, applied=True, readable=True)
        assert trial.publish(sender).version == 1
        hear(trial)
    trial.receiver().pull()
    trial.assert_holds(1)


def test_a_lost_reply_is_settled_by_reading_back_as_a_conflict(trial: Trial) -> None:
    trial.run(0)
    with trial.sender(fence=False) as loser:
        with trial.sender(fence=False, state_dir=trial.root / "elsewhere") as winner:
            trial.publish(winner)
        deafen(trial, applied=False, readable=True)
        with pytest.raises(CommitConflict, match="another sender committed version 1 first"):
            loser.publish(save(changed(trial.states[0], 9, 0.1), trial.root / "lost", shards=2))
        hear(trial)
    trial.receiver().pull()
    trial.assert_holds(1)


@pytest.mark.parametrize("applied", [False, True])
def test_what_cannot_be_settled_is_said_to_be_unknown_and_reopening_finds_out(trial: Trial, applied: bool) -> None:
    with trial.sender(fence=False) as sender:
        deafen(trial, applied=applied, readable=False)
        state = changed(trial.states[0], 9, 0.1)
        with pytest.raises(UnknownOutcome, match="reopen the run to find out"):
            trial.publish(sender, state)
        hear(trial)
        assert isinstance(sender.stopped, UnknownOutcome)
        with pytest.raises(DcrError, match="open the run again"):
            sender.version()
    assert (manifest_key(1) in trial.listed()) == applied
    if applied:
        trial.states.append(state)
    with trial.sender(fence=False) as sender:
        assert sender.position.version == applied
        trial.publish(sender)
    trial.receiver().pull()
    trial.assert_holds(applied + 1)


def test_the_version_that_is_held_only_moves_forward(trial: Trial) -> None:
    trial.run(3)
    trial.receiver().pull()
    report = trial.receiver().pull(to_version=1)
    assert (report.from_version, report.version) == (3, 3)
    trial.assert_holds(3)
