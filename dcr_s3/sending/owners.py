"""The ranks of one trainer that publish a version together: each its own segments, one manifest by rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

from dcr_s3.errors import (
    CommitConflict,
    CorruptObject,
    DcrError,
    NotFound,
    OwnerFailed,
    StoreUnavailable,
    UnknownOutcome,
)
from dcr_s3.format import limits
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.keys import manifest_key, owner_key
from dcr_s3.format.manifest import Manifest, SegmentEntry
from dcr_s3.format.owner import OwnerList
from dcr_s3.store.base import Store
from dcr_s3.world import world

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5


class Owners:
    """This rank's place among ``count`` owners, and how long it waits for the others, in seconds.

    They talk through objects in the bucket, so a rank that dies is known by the list that it does not write. A single
    owner writes none.
    """

    def __init__(self, store: Store, owner: int = 0, count: int = 1, *, timeout_s: float = 600.0) -> None:
        if not 0 <= owner < count <= limits.OWNERS:
            raise ValueError(f"owner {owner} of {count}")
        self.owner = owner
        self.count = count
        self.timeout_s = timeout_s
        self._store = store

    def gather(self, mine: OwnerList) -> OwnerList:
        """Owner 0: all lists as one, once every owner has written its own. Raises ``OwnerFailed`` naming who failed or
        did not.
        """
        lists = {self.owner: mine}

        def look() -> bool | None:
            for owner in range(self.count):
                if owner not in lists and (found := self._read(mine, owner)) is not None:
                    if found.error is not None:
                        raise OwnerFailed(f"version {mine.version}: owner {owner} failed: {found.error}")
                    lists[owner] = found
            return True if len(lists) == self.count else None

        if self._poll(look, self.timeout_s) is None:
            silent = [str(owner) for owner in range(self.count) if owner not in lists]
            raise OwnerFailed(
                f"version {mine.version}: owner {', '.join(silent)} did not finish within {self.timeout_s:g} s; "
                "that rank may be dead, or its network slow"
            )
        return merge([lists[owner] for owner in range(self.count)])

    def follow(self, mine: OwnerList) -> bytes:
        """Any other owner: writes its list and waits for owner 0's commit; returns the manifest.

        Raises ``OwnerFailed`` if owner 0 gave the attempt up, ``CommitConflict`` if another sender committed this
        version, ``UnknownOutcome`` if owner 0 stays silent: then only reopening the run tells.
        """
        self._store.put(owner_key(mine.version, mine.attempt, self.owner), mine.to_bytes())

        def look() -> bytes | None:
            key = manifest_key(mine.version)
            try:
                found = self._store.get(key, limit_bytes=limits.MANIFEST_BYTES)
                assert found is not None
                if Manifest.from_bytes(found.body, where=key).attempt != mine.attempt:
                    raise CommitConflict(f"{key}: another sender committed version {mine.version} first")
                return found.body
            except NotFound:
                pass
            verdict = self._read(mine, 0)
            if verdict is not None:
                raise OwnerFailed(verdict.error or f"version {mine.version}: owner 0 gave up")
            return None

        # Owner 0 may begin to wait for the slowest owner only now, and then has something to say.
        patience_s = 2 * self.timeout_s
        body = self._poll(look, patience_s)
        if body is None:
            raise UnknownOutcome(
                f"version {mine.version}: owner 0 has neither committed nor given up within {patience_s:g} s; "
                "it may be dead; reopen the run to find out"
            )
        return body

    def fail(self, run_id: str, version: int, attempt: str, error: BaseException) -> None:
        """Tells the others that this attempt has failed here."""
        told = isinstance(error, OwnerFailed) and self.owner != 0
        if self.count == 1 or told:
            return
        text = str(error) if isinstance(error, DcrError) else f"{type(error).__name__}: {error}"
        verdict = OwnerList(run_id=run_id, version=version, attempt=attempt, owner=self.owner, error=text[:2000])
        try:
            self._store.put(owner_key(version, attempt, self.owner), verdict.to_bytes())
        except Exception as trouble:
            log.warning("version %d: could not tell the other owners of a failure (%s)", version, trouble)

    def _read(self, mine: OwnerList, owner: int) -> OwnerList | None:
        key = owner_key(mine.version, mine.attempt, owner)
        try:
            found = self._store.get(key, limit_bytes=limits.MANIFEST_BYTES)
        except NotFound:
            return None
        assert found is not None
        result = OwnerList.from_bytes(found.body, where=key)
        place = (result.run_id, result.version, result.attempt, result.owner)
        if place != (mine.run_id, mine.version, mine.attempt, owner):
            raise CorruptObject(f"{key}: says that it is another owner's, or of another run")
        return result

    def _poll(self, look: Callable[[], T | None], timeout_s: float) -> T | None:
        """Looks until there is an answer; None after ``timeout_s``. An unreachable store is waited for."""
        deadline, pause = world().monotonic() + timeout_s, FIRST_PAUSE_S
        while True:
            try:
                if (found := look()) is not None:
                    return found
            except StoreUnavailable as error:
                log.warning("%s; still waiting for the other owners", error)
            if world().monotonic() >= deadline:
                return None
            world().sleep(pause * world().uniform(0.75, 1.25))
            pause = min(LONGEST_PAUSE_S, pause * 1.5)


def merge(lists: Iterable[OwnerList]) -> OwnerList:
    """Lists in order of their owners as one."""
    lists = list(lists)
    gain = StateDigest()
    for one in lists:
        gain += StateDigest.from_hex(one.gain)
    segments: list[SegmentEntry] = [entry for one in lists for entry in one.segments]
    touched = {n for one in lists for first, last in one.touched for n in range(first, last + 1)}
    return lists[0].model_copy(
        update={
            "segments": tuple(segments),
            "gain": gain.hex(),
            "touched": ranges(sorted(touched)),
            "changed_elements": sum(one.changed_elements for one in lists),
        }
    )


def ranges(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Ascending numbers as inclusive ranges."""
    result: list[tuple[int, int]] = []
    for number in numbers:
        if result and result[-1][1] == number - 1:
            result[-1] = (result[-1][0], number)
        else:
            result.append((number, number))
    return tuple(result)
