"""Keeps a mirror at the newest version: one cheap look after the other, the cheapest way where there is much to do."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

from dcr_s3.errors import ChainBroken, NotFound, RetryError
from dcr_s3.format import limits
from dcr_s3.format.keys import RELEASE_KEY, manifest_key
from dcr_s3.joint import Acknowledger, parse_release, released_version
from dcr_s3.patience import Patience
from dcr_s3.protocol.chain import read_next
from dcr_s3.protocol.polling import Polling
from dcr_s3.replay import Applied, Replay
from dcr_s3.reports import PullReport
from dcr_s3.store import Poller
from dcr_s3.world import world

log = logging.getLogger(__name__)


class Follower:
    """One stretch of following. ``halt`` ends it after the step in hand, ``until_version`` once that is held."""

    def __init__(
        self,
        replay: Replay,
        poller: Poller,
        acknowledger: Acknowledger,
        *,
        on_pull: Callable[[PullReport], None],
        halt: threading.Event,
        polling: Polling,
        until_version: int | None = None,
        released_only: bool = False,
    ) -> None:
        self._replay = replay
        self._poller = poller
        self._acknowledger = acknowledger
        self._on_pull = on_pull
        self._halt = halt
        self._polling = polling
        self._until_version = until_version
        self._released_only = released_only
        self._caught_up = False

    async def run(self) -> None:
        """Follows. Store trouble is logged and waited out; other errors are raised."""
        patience = Patience(self._polling.interval_s)
        while not self._halt.is_set() and (self._until_version is None or self._version < self._until_version):
            try:
                delay = await self._step()
                patience.succeeded()
            except RetryError as error:
                delay = patience.after(error)
            if delay:
                await asyncio.to_thread(world().wait, self._halt, delay * world().uniform(0.75, 1.25))
        if self._acknowledger.is_due(self._replay.mirror.position):
            await asyncio.to_thread(self._acknowledger.send, self._replay.mirror.position)

    @property
    def _version(self) -> int:
        return self._replay.mirror.position.version

    async def _step(self) -> float:
        """One look; the seconds to wait before the next one."""
        replay, polling = self._replay, self._polling
        if polling.at_segment:
            return polling.after_segment(found=await asyncio.to_thread(replay.stage_ahead))
        found = not self._caught_up and await self._catch_up()
        self._caught_up = True
        found = found or await (self._look_released() if self._released_only else self._look())
        if not found and self._acknowledger.is_due(replay.mirror.position):
            await asyncio.to_thread(self._acknowledger.send, replay.mirror.position)
            await asyncio.to_thread(replay.mirror.flush)
        announced = replay.mirror.position.next_attempt is not None and not self._released_only
        return polling.after_manifest(found=found, announced=announced)

    async def _catch_up(self) -> bool:
        """Goes to the newest version by the cheapest way; True if there was anything to apply."""
        limit = self._until_version
        if self._released_only:
            released = await asyncio.to_thread(released_version, self._replay.store, self._replay.run.run_id)
            limit = released if limit is None else min(limit, released)
        steps = self._replay.catch_up(to_version=limit)
        found = False
        while not self._halt.is_set():
            before, begun = self._version, world().monotonic()
            applied = await asyncio.to_thread(next, steps, None)
            if applied is None:
                break
            found = True
            self._on_pull(pull_report(self._replay, before, [applied], begun))
        return found

    async def _look(self) -> bool:
        """One look at the next manifest; applies it if it is there."""
        position = self._replay.mirror.position
        begun = world().monotonic()
        try:
            found = await self._poller.get(manifest_key(position.version + 1), limit_bytes=limits.MANIFEST_BYTES)
        except NotFound:
            return False
        assert found is not None
        manifest, target = read_next(position, found.body)
        poll_s = world().monotonic() - begun
        try:
            applied = await asyncio.to_thread(self._replay.apply, manifest, target, len(found.body), poll_s=poll_s)
        except ChainBroken as error:
            log.info("%s; looking for another way", error)
            return await self._catch_up()
        self._on_pull(pull_report(self._replay, position.version, [applied], begun))
        return True

    async def _look_released(self) -> bool:
        """One look at the release; goes to it if it has moved."""
        store = self._replay.store
        try:
            found = await self._poller.get(RELEASE_KEY, limit_bytes=limits.RELEASE_BYTES)
        except NotFound:
            return False
        assert found is not None
        if parse_release(store, self._replay.run.run_id, found.body).version <= self._version:
            return False
        return await self._catch_up()


def pull_report(replay: Replay, before: int, applied: Sequence[Applied], begun: float) -> PullReport:
    """What some steps from version ``before`` took, since ``begun`` by the monotonic clock."""
    seconds: dict[str, float] = {}
    for one in applied:
        for stage, length in one.seconds.items():
            seconds[stage] = round(seconds.get(stage, 0.0) + length, 6)
    seconds["total"] = round(world().monotonic() - begun, 6)
    position = replay.mirror.position
    return PullReport(
        version=position.version,
        from_version=before,
        step=position.step,
        changed_elements=sum(a.changed_elements for a in applied),
        total_elements=replay.run.total_elements,
        wire_bytes=sum(a.wire_bytes for a in applied),
        dense_bytes=replay.run.dense_bytes,
        seconds=seconds,
        up_to_date=not applied,
        applied_at=world().time(),
    )
