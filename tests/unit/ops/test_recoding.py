"""A relay that codes anew: same bits, same numbers, whatever happens to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from dcr_s3 import Receiver, Sender
from dcr_s3.errors import BadInput, RunExists
from dcr_s3.protocol.position import Position
from dcr_s3.reading import load_run, read_position
from dcr_s3.recoding import Recoder
from dcr_s3.store import Store
from dcr_s3.store.memory import MemoryStore
from dcr_s3.store.nearby import NearbyStore
from dcr_s3.store.wrapped import Request, WrappedStore
from dcr_s3.testing.checkpoints import State, changed, differing, load, make_state, save

R = TypeVar("R")


class Source:
    """A run whose states are known; its first version is a fence, as a trainer makes it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = MemoryStore()
        self.states: list[State] = [make_state(0)] * 2
        save(self.states[0], root / "base")
        self.publish()

    def publish(self, versions: int = 2, *, fence: bool = False) -> None:
        first = len(self.states) == 2
        with Sender.open(
            self.store, base=self.root / "base", state_dir=self.root / "sender", workers=0, fence=first or fence
        ) as sender:
            if fence:
                self.states.append(self.states[-1])
            for _ in range(versions):
                self.states.append(changed(self.states[-1], len(self.states), 0.05))
                sender.publish(save(self.states[-1], self.root / "trained"), step=10 * len(self.states))

    @property
    def newest(self) -> int:
        return len(self.states) - 1

    def recoder(self, target: Store, name: str = "relay") -> Recoder:
        return Recoder(self.store, target, self.root / name, base=self.root / "base", name=name, workers=0)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path)


def positions(store: Store, newest: int) -> list[Position]:
    _, start = load_run(store)
    return [read_position(store, start, version) for version in range(newest + 1)]


def assert_same(source: Source, target: Store) -> None:
    """Every version has the same number, step and bits at both places; the target needs no mirror."""
    here, there = positions(source.store, source.newest), positions(target, source.newest)
    assert [(p.version, p.state) for p in here] == [(p.version, p.state) for p in there]
    run, _ = load_run(target)
    assert run.coding == "context-free"
    assert run.run_id != load_run(source.store)[0].run_id
    mirror = source.root / f"mirror-{threading.get_native_id()}-{source.newest}"
    assert Receiver(target, mirror, workers=0).pull().version == source.newest
    assert differing(load(mirror), source.states[-1]) == []


def test_versions_keep_their_numbers_and_bits(source: Source) -> None:
    target = MemoryStore()
    report = source.recoder(target).copy()
    assert (report.version, report.versions) == (3, 3)
    assert report.down_bytes > 0 < report.up_bytes
    assert_same(source, target)
    assert source.recoder(target).copy().versions == 0
    source.publish(1, fence=True)
    assert source.recoder(target).copy().versions == 2
    assert_same(source, target)
    assert positions(target, source.newest)[-1].step == positions(source.store, source.newest)[-1].step


def test_it_follows(source: Source) -> None:
    target = MemoryStore()
    seen: list[int] = []
    relay = threading.Thread(
        target=source.recoder(target).follow,
        args=(lambda report: seen.append(report.version),),
        kwargs={"until_version": 5, "poll_interval_s": 0.01},
        daemon=True,
    )
    relay.start()
    source.publish(2)
    relay.join(timeout=60)
    assert seen == [1, 2, 3, 4, 5]
    assert_same(source, target)


class Killed(BaseException):
    """The process is gone."""


class Dying(WrappedStore):
    """Does ``left`` more requests, then none."""

    def __init__(self, inner: Store, left: int) -> None:
        super().__init__(inner)
        self.left = left

    def around(self, request: Request, send: Callable[[Request], R]) -> R:
        if self.left == 0:
            raise Killed
        self.left -= 1
        return send(request)


def test_interrupted_at_any_request_it_goes_on(source: Source) -> None:
    target, left = MemoryStore(), 0
    while True:
        try:
            done = source.recoder(Dying(target, left)).copy()
            break
        except Killed:
            left += 1
    assert done.version == source.newest
    assert left > 10
    assert_same(source, target)


def test_without_its_directory_it_goes_on_in_another(source: Source) -> None:
    target = MemoryStore()
    source.recoder(target).copy()
    source.publish(2)
    assert source.recoder(target, "relay-2").copy().versions == 2
    assert_same(source, target)


def test_two_of_them_do_no_harm(source: Source) -> None:
    target = MemoryStore()
    relays = [
        threading.Thread(
            target=source.recoder(target, f"relay-{n}").follow, kwargs={"until_version": 3, "poll_interval_s": 0.01}
        )
        for n in range(2)
    ]
    for relay in relays:
        relay.start()
    for relay in relays:
        relay.join(timeout=60)
    assert_same(source, target)


def test_a_directory_that_is_ahead_of_the_target(source: Source) -> None:
    source.recoder(MemoryStore()).copy()
    with pytest.raises(BadInput, match="holds version 3, but the target needs version 0"):
        source.recoder(MemoryStore()).copy()


def test_another_run_at_the_target(source: Source, tmp_path: Path) -> None:
    with pytest.raises(RunExists, match="coded context free"):
        source.recoder(source.store).copy()
    target = MemoryStore()
    source.recoder(target).copy()
    with Sender.open(target, state_dir=tmp_path / "intruder", workers=0, fence=False) as sender:
        sender.publish(save(make_state(7), tmp_path / "other"))
    source.publish(2)
    with pytest.raises(RunExists, match="version 4 has other bits"):
        source.recoder(target).copy()


def test_the_two_codings_cannot_be_mixed(source: Source, tmp_path: Path) -> None:
    recoded = MemoryStore()
    source.recoder(recoded).copy()
    with pytest.raises(BadInput, match="is another run than"):
        Receiver(NearbyStore(source.store, [recoded]), tmp_path / "mixed", base=tmp_path / "base", workers=0).pull()
