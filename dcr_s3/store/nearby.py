"""Several places to read one run from: relays' copies nearby first, the run's own bucket as the last resort."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from dcr_s3.errors import BadInput, NotFound, RetryError
from dcr_s3.format.keys import RUN_KEY
from dcr_s3.store import open_store
from dcr_s3.store.base import Object, ObjectInfo, Store
from dcr_s3.store.wrapped import WrappedStore
from dcr_s3.world import world

R = TypeVar("R")

log = logging.getLogger(__name__)

PATIENCE_S = 30.0
_REMEMBERED = 64
_NEVER_CHANGING = ("run.json", "manifests/", "segments/", "snapshots/", "folds/")


def open_nearest(run: str, nearby: Sequence[str]) -> Store:
    """The store of a run, read from the first address of ``nearby`` that has what is wanted."""
    return NearbyStore(open_store(run), [open_store(url) for url in nearby]) if nearby else open_store(run)


class NearbyStore(WrappedStore):
    """Reads what never changes from the first of ``near`` that answers; all else happens at ``home``.

    ``home`` is read where every nearby copy is out of reach, where a committed object is missing from it, and where a
    manifest has been at ``home`` for ``patience_s`` without reaching the copy: a relay that has stopped delays nobody
    for longer. Mixing places is safe, since their objects have the same bytes; a place whose ``run.json`` is not
    home's is another run, a recoded one perhaps, and is refused with ``BadInput``.
    """

    def __init__(self, home: Store, near: Sequence[Store], *, patience_s: float = PATIENCE_S) -> None:
        super().__init__(home)
        self._near = near
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._seen: dict[str, float] = {}
        self._look_at: dict[str, float] = {}

    def get(self, key: str, *, limit_bytes: int, if_none_match: str | None = None) -> Object | None:
        def read(store: Store) -> Object | None:
            return store.get(key, limit_bytes=limit_bytes, if_none_match=if_none_match)

        if key == RUN_KEY:
            self._require_copies(limit_bytes)
        if not key.startswith(_NEVER_CHANGING):
            return read(self.inner)
        return self._first(read, lambda: self._overdue(key))

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        self._first(lambda store: store.read_into(key, start, buffer), lambda: True)

    def head(self, key: str) -> ObjectInfo:
        return self._first(lambda store: store.head(key), lambda: self._overdue(key))

    def close(self) -> None:
        for store in (*self._near, self.inner):
            store.close()

    def _first(self, read: Callable[[Store], R], go_home: Callable[[], bool]) -> R:
        missing: NotFound | None = None
        for store in self._near:
            try:
                return read(store)
            except NotFound as error:
                missing = error
            except RetryError as error:
                log.warning("%s; reading from the next place", error)
        if missing is not None and not go_home():
            raise missing
        return read(self.inner)

    def _require_copies(self, limit_bytes: int) -> None:
        """Compares every place's ``run.json`` with home's. Where home cannot be reached, nothing is known."""
        try:
            home = self.inner.get(RUN_KEY, limit_bytes=limit_bytes)
        except (NotFound, RetryError):
            return
        for store in self._near:
            try:
                copy = store.get(RUN_KEY, limit_bytes=limit_bytes)
            except (NotFound, RetryError):
                continue
            if copy is not None and home is not None and copy.body != home.body:
                raise BadInput(
                    f"{store.url}: is another run than {self.inner.url}, not a copy of it; a run that a relay "
                    "has coded anew is followed by its own address alone"
                )

    def _overdue(self, key: str) -> bool:
        """Whether an object that no nearby copy has was at home ``patience_s`` ago, by its age there or since it was
        first seen. Looks there a few times per ``patience_s`` only, so that waiting costs next to nothing."""
        now = world().monotonic()
        with self._lock:
            if key in self._seen:
                return now - self._seen[key] >= self._patience_s
            if now < self._look_at.get(key, 0.0):
                return False
            if len(self._look_at) > _REMEMBERED:
                self._look_at.clear()
                self._seen.clear()
            self._look_at[key] = now + self._patience_s / 4
        try:
            age_s = max(world().time() - self.inner.head(key).modified_at, 0.0)
        except NotFound:
            return False
        with self._lock:
            self._seen[key] = now - age_s
        return age_s >= self._patience_s
