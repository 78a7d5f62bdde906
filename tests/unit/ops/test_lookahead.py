"""Looking for segments before their commit: which places, how many at once, in which order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from dcr_s3.errors import StoreUnavailable
from dcr_s3.lookahead import AT_ONCE, Lookahead, Place
from dcr_s3.store.memory import MemoryStore
from dcr_s3.store.wrapped import Request, WrappedStore
from dcr_s3.workers import InlineExecutor

R = TypeVar("R")

VERSION = 3
ATTEMPT = "000001-000000000000-0000"


def place(owner: int, seq: int) -> Place:
    return Place(VERSION, ATTEMPT, owner, seq)


class Watched(WrappedStore):
    """A store with segments, that notes what it is asked for; ``together`` requests wait for each other."""

    def __init__(self, *there: tuple[int, int]) -> None:
        super().__init__(MemoryStore())
        self.asked: list[str] = []
        self.most = 0
        self.together = 1
        self.error: Exception | None = None
        self._busy = 0
        self._change = threading.Condition()
        for owner, seq in there:
            self.inner.put(place(owner, seq).key, bytearray(f"{owner}/{seq}".encode()))

    def around(self, request: Request, send: Callable[[Request], R]) -> R:
        with self._change:
            self.asked.append(request.key)
            self._busy += 1
            self.most = max(self.most, self._busy)
            self._change.notify_all()
            self._change.wait_for(lambda: self.most >= self.together, timeout=30)
        try:
            if self.error is not None:
                raise self.error
            return send(request)
        finally:
            with self._change:
                self._busy -= 1


class Taker:
    """Takes segments, but not those of ``unwanted``."""

    def __init__(self, lookahead: Lookahead, owners: int = 1, unwanted: Sequence[Place] = ()) -> None:
        self.taken: list[tuple[int, int]] = []
        self.held: set[str] = set()
        self.unwanted = unwanted
        self._lookahead = lookahead
        self._owners = owners

    def __call__(self) -> bool:
        return self._lookahead.find(VERSION, ATTEMPT, self._owners, self.held, self._take)

    def _take(self, found: Place, body: bytes) -> bool:
        assert body.decode() == f"{found.owner}/{found.seq}"
        if found in self.unwanted:
            return False
        self.taken.append((found.owner, found.seq))
        self.held.add(found.key)
        return True


@pytest.fixture
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(8)


def keys(*places: tuple[int, int]) -> list[str]:
    return [place(*one).key for one in places]


def test_without_threads_one_place_after_the_other() -> None:
    store = Watched((0, 0), (0, 1), (0, 2))
    take = Taker(Lookahead(store, InlineExecutor()))
    assert [take(), take(), take(), take()] == [True, True, True, False]
    assert take.taken == [(0, 0), (0, 1), (0, 2)]
    assert store.asked == keys((0, 0), (0, 1), (0, 2), (0, 3))


def test_several_at_once_in_their_order(pool: ThreadPoolExecutor) -> None:
    segments = [(0, seq) for seq in range(12)]
    store = Watched(*segments)
    take = Taker(Lookahead(store, pool))
    assert take()
    store.together = 2
    while take():
        pass
    assert take.taken == segments
    assert 2 <= store.most <= AT_ONCE
    assert sorted(store.asked)[:12] == sorted(keys(*segments))
    assert len(store.asked) < 12 + AT_ONCE + 1


def test_while_nothing_is_there_one_place_is_asked_for(pool: ThreadPoolExecutor) -> None:
    store = Watched()
    take = Taker(Lookahead(store, pool))
    assert not take()
    assert not take()
    assert store.asked == keys((0, 0), (0, 0))


def test_a_gap_is_looked_at_again(pool: ThreadPoolExecutor) -> None:
    store = Watched((0, 0), (0, 1), (0, 3))
    take = Taker(Lookahead(store, pool))
    while take():
        pass
    assert (0, 2) not in take.taken
    store.inner.put(place(0, 2).key, bytearray(b"0/2"))
    while take():
        pass
    assert sorted(take.taken) == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_owners_take_turns() -> None:
    store = Watched((0, 0), (0, 1), (2, 0))
    take = Taker(Lookahead(store, InlineExecutor()), owners=3)
    while take():
        pass
    assert take.taken == [(0, 0), (2, 0), (0, 1)]


def test_all_owners_are_looked_at_together(pool: ThreadPoolExecutor) -> None:
    segments = [(owner, 0) for owner in range(4)]
    store = Watched(*segments)
    store.together = 4
    take = Taker(Lookahead(store, pool), owners=4)
    while take():
        pass
    assert sorted(take.taken) == segments


def test_what_is_not_wanted_is_looked_at_again_later() -> None:
    store = Watched((0, 0), (0, 1))
    take = Taker(Lookahead(store, InlineExecutor()), unwanted=[place(0, 0)])
    assert not take()
    take.unwanted = ()
    assert take()
    assert take.taken == [(0, 0)]


def test_trouble_is_reported_and_nothing_is_lost_by_it(pool: ThreadPoolExecutor) -> None:
    store = Watched((0, 0), (0, 1))
    take = Taker(Lookahead(store, pool))
    store.error = StoreUnavailable("no answer")
    with pytest.raises(StoreUnavailable):
        take()
    store.error = None
    while take():
        pass
    assert take.taken == [(0, 0), (0, 1)]


def test_another_version_begins_at_the_beginning(pool: ThreadPoolExecutor) -> None:
    store = Watched((0, 0))
    lookahead = Lookahead(store, pool)
    take = Taker(lookahead)
    assert take()
    lookahead.forget()
    take.held.clear()
    assert take()
    assert take.taken == [(0, 0), (0, 0)]
