"""The sender's baseline follows a commit in the background, and nothing is compared with it before it is there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dcr_s3 import Sender, init_run
from dcr_s3.errors import DiskFull
from dcr_s3.format.keys import manifest_key
from dcr_s3.store.memory import MemoryStore
from dcr_s3.targets.directory import DirectoryMirror
from dcr_s3.testing.checkpoints import changed, make_state, save

BASE = make_state(1)


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[Sender]:
    store = MemoryStore()
    base = save(BASE, tmp_path / "base")
    init_run(store, base)
    with Sender.open(store, base=base, state_dir=tmp_path / "state", fence=False, workers=2) as sender:
        yield sender


def slow_down(monkeypatch: pytest.MonkeyPatch, before: Callable[[], None]) -> None:
    """Calls ``before`` each time a baseline is about to move."""
    advance = DirectoryMirror.advance

    def delayed(mirror: DirectoryMirror, *arguments: Any) -> None:
        before()
        advance(mirror, *arguments)

    monkeypatch.setattr(DirectoryMirror, "advance", delayed)


def test_a_version_is_published_before_the_baseline_has_followed(
    sender: Sender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    slow_down(monkeypatch, lambda: gate.wait(60) or pytest.fail("never let through"))
    first, second = changed(BASE, 1, 0.3), changed(BASE, 2, 0.3)
    report = sender.publish(save(first, tmp_path / "first"))
    assert (report.version, sender.position.version) == (1, 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sender.publish, save(second, tmp_path / "second"))
        assert not waiting.done() and not gate.is_set()
        gate.set()
        waiting.result()
    again = sender.publish(save(second, tmp_path / "again"))
    assert (again.version, again.changed_elements) == (3, 0)


def test_a_baseline_that_cannot_follow_stops_the_sender_after_the_commit(
    sender: Sender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise DiskFull("no room")

    slow_down(monkeypatch, full)
    state = save(changed(BASE, 1, 0.3), tmp_path / "first")
    caught: list[BaseException] = []
    try:
        sender.publish(state)
    except DiskFull as error:  # where the disk was faster than the commit's own return
        caught.append(error)
    assert isinstance(sender.stopped, DiskFull)
    assert "version 1 is committed" in " ".join(sender.stopped.__notes__)
    assert sender._store.get(manifest_key(1), limit_bytes=1 << 20)
    with pytest.raises(Exception, match="no room"):
        sender.publish(state)
