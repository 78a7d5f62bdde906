"""Looks for segments of the version that is being written, several at once, at the places it was announced for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future
from typing import NamedTuple

from dcr_s3.errors import NotFound
from dcr_s3.format.keys import segment_key
from dcr_s3.store.base import Object, Store
from dcr_s3.workers import InlineExecutor

AT_ONCE = 4
OWNERS_PER_ROUND = 8
SEGMENT_BYTES = 64 << 20
"""Larger segments wait for their commit, so that no more than ``AT_ONCE`` times as much is held in memory."""


class Place(NamedTuple):
    """Where a segment belongs, as its header must say."""

    version: int
    attempt: str
    owner: int
    seq: int

    @property
    def key(self) -> str:
        """Of the object there."""
        return segment_key(*self)


class Lookahead:
    """Takes the owners' segments in turn, each owner's in order.

    Once segments are found, up to ``AT_ONCE`` places are looked at at the same time; after the first that is missing it
    is one for each owner again, so that little is asked for in vain. Without threads it is always one.
    """

    def __init__(self, store: Store, fetchers: Executor) -> None:
        self._store = store
        self._fetchers = fetchers
        self._most = 1 if isinstance(fetchers, InlineExecutor) else AT_ONCE
        self._at_once = 1
        self._turn = 0
        self._looks: deque[tuple[Place, Future[Object | None]]] = deque()

    def find(
        self, version: int, attempt: str, owners: int, held: Collection[str], take: Callable[[Place, bytes], bool]
    ) -> bool:
        """Hands the next segment that is there to ``take``; False once a round over the owners has found none.

        ``held``: keys of the segments that were taken before. One that ``take`` does not want, which it says by False,
        is looked at again in a later round. Raises what the store and ``take`` raise.
        """
        missed = 0
        while True:
            at_once = max(self._at_once, min(owners, self._most))
            in_round = max(self._at_once, min(owners, OWNERS_PER_ROUND))
            while len(self._looks) < at_once and missed + len(self._looks) < in_round:
                place = self._next_place(version, attempt, owners, held)
                self._looks.append((place, self._fetchers.submit(self._look, place)))
            if not self._looks:
                return False
            place, look = self._looks.popleft()
            found = look.result()
            if found is not None and take(place, found.body):
                self._at_once = min(2 * self._at_once, self._most)
                return True
            self._at_once = 1
            missed += 1

    def forget(self) -> None:
        """Lets go of what is being looked at, for another version."""
        for _, look in self._looks:
            look.cancel()
        self._looks.clear()
        self._at_once = 1

    def _next_place(self, version: int, attempt: str, owners: int, held: Collection[str]) -> Place:
        owner, self._turn = self._turn % owners, self._turn + 1
        looked_at = {place for place, _ in self._looks}
        place = Place(version, attempt, owner, 0)
        while place in looked_at or place.key in held:
            place = place._replace(seq=place.seq + 1)
        return place

    def _look(self, place: Place) -> Object | None:
        try:
            return self._store.get(place.key, limit_bytes=SEGMENT_BYTES)
        except NotFound:
            return None
