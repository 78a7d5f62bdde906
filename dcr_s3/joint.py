"""Joint commit: waits until receivers have proved a version, and releases it to those that wait for that."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from dcr_s3.errors import (
    BadInput,
    CorruptObject,
    Forbidden,
    NotAcknowledged,
    NotFound,
    PreconditionFailed,
    StoreUnavailable,
)
from dcr_s3.format import limits
from dcr_s3.format.ack import Ack
from dcr_s3.format.keys import ACK_PREFIX, RELEASE_KEY, ack_key, ack_receiver, manifest_key
from dcr_s3.format.release import Release
from dcr_s3.protocol.membership import Member, Required, lacking, proved_by
from dcr_s3.protocol.position import Position
from dcr_s3.store.base import Store
from dcr_s3.world import timestamp, world

log = logging.getLogger(__name__)

RELEASE_TRIES = 8


class Roster:
    """The acknowledgements of a run, read again only where they changed."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._read: dict[str, tuple[str, Ack]] = {}

    def members(self) -> list[Member]:
        """Everyone with an acknowledgement, alive or not, by name. One LIST, and one GET for each that changed."""
        return list(self._members())

    def _members(self) -> Iterator[Member]:
        for info in self._store.list(ACK_PREFIX):
            if ack_receiver(info.key) is None:
                continue
            known = self._read.get(info.key)
            ack = known[1] if known is not None and known[0] == info.etag else self._fetch(info.key)
            if ack is not None:
                yield Member(ack.receiver, ack.version, ack.state, info.modified_at, ack.lease_s)

    def _fetch(self, key: str) -> Ack | None:
        try:
            found = self._store.get(key, limit_bytes=limits.ACK_BYTES)
            assert found is not None
            ack = Ack.from_bytes(found.body, where=f"{self._store.url}/{key}")
        except NotFound:
            return None  # it left since it was listed
        except CorruptObject as error:
            log.warning("an acknowledgement is left out: %s", error)
            return None
        if ack.run_id != self._run_id or ack_key(ack.receiver) != key:
            log.warning("%s/%s: is of another run or receiver and is left out", self._store.url, key)
            return None
        self._read[key] = (found.etag, ack)
        return ack


class Acknowledger:
    """One receiver's acknowledgements, each a lease of ``lease_s`` seconds. With ``enabled`` False it writes none."""

    def __init__(self, store: Store, name: str, lease_s: int, *, enabled: bool = True) -> None:
        self._store = store
        self._name = name
        self._lease_s = lease_s
        self._enabled = enabled
        self._sent: tuple[str, float] | None = None

    def is_due(self, position: Position) -> bool:
        """True for a position not acknowledged yet, and when a third of the lease has passed."""
        if self._sent is None or self._sent[0] != position.sha256:
            return True
        return world().monotonic() - self._sent[1] > self._lease_s / 3

    def send(self, position: Position) -> None:
        """Says that the receiver holds a version, bit for bit. Raises ``Forbidden`` if it may not."""
        now = world().monotonic()
        if self._enabled:
            self._put(position)
        self._sent = position.sha256, now

    def _put(self, position: Position) -> None:
        ack = Ack(
            run_id=position.run_id,
            receiver=self._name,
            version=position.version,
            state=position.state,
            proved_at=timestamp(),
            lease_s=self._lease_s,
        )
        try:
            self._store.put(ack_key(self._name), bytearray(ack.to_bytes()))
        except Forbidden as error:
            raise Forbidden(
                f"{error}; version {position.version} is in place, only its acknowledgement is not: "
                "allow writing acks/*, or do not acknowledge"
            ) from error


def wait_for(
    store: Store, position: Position, required: Required, *, timeout_s: float, poll_interval_s: float = 0.5
) -> list[str]:
    """Waits until the required receivers have proved a committed version; names of all that have.

    Raises ``NotAcknowledged`` naming whoever has not when ``timeout_s`` is over.
    """
    roster = Roster(store, position.run_id)
    begun = world().monotonic()
    while True:
        members = roster.members()
        missing = lacking(members, position, required, store_time(store, members, position))
        if not missing:
            return proved_by(members, position)
        left_s = begun + timeout_s - world().monotonic()
        if left_s <= 0:
            raise NotAcknowledged(
                f"{store.url}: after {timeout_s:g} s version {position.version} is not proved by {', '.join(missing)}"
            )
        world().sleep(min(poll_interval_s, left_s))


def store_time(store: Store, members: list[Member], position: Position) -> float:
    """A moment that the store's clock has passed: the newest of what it dated. This machine's clock plays no part."""
    times = [m.seen_at for m in members]
    try:
        times.append(store.head(manifest_key(position.version)).modified_at)
    except NotFound:
        pass
    return max(times, default=0.0)


def read_release(store: Store, run_id: str) -> tuple[Release, str] | None:
    """The release and its ETag, None if nothing was released yet. Raises ``CorruptObject``."""
    try:
        found = store.get(RELEASE_KEY, limit_bytes=limits.RELEASE_BYTES)
    except NotFound:
        return None
    assert found is not None
    return parse_release(store, run_id, found.body), found.etag


def released_version(store: Store, run_id: str) -> int:
    """The released version, 0 if nothing was released yet."""
    found = read_release(store, run_id)
    return found[0].version if found is not None else 0


def parse_release(store: Store, run_id: str, body: bytes) -> Release:
    """The release in ``body``. Raises ``CorruptObject`` if it is of another run."""
    release = Release.from_bytes(body, where=f"{store.url}/{RELEASE_KEY}")
    if release.run_id != run_id:
        raise CorruptObject(f"{store.url}/{RELEASE_KEY}: belongs to run {release.run_id}, not to {run_id}")
    return release


def release(store: Store, position: Position, required: Required) -> Release:
    """Moves `release.json` to a committed version that all required receivers have proved; never backwards.

    Returns what is released afterwards: this version, or the newer one that was released already. Raises
    ``NotAcknowledged`` naming whoever has not proved it, ``BadInput`` if nobody has.
    """
    members = Roster(store, position.run_id).members()
    missing = lacking(members, position, required, store_time(store, members, position))
    if missing:
        raise NotAcknowledged(f"{store.url}: version {position.version} is not proved by {', '.join(missing)}")
    proved = proved_by(members, position)
    if not proved:
        raise BadInput(f"{store.url}: version {position.version} is proved by nobody; a release needs a receiver")
    for _ in range(RELEASE_TRIES):
        current = read_release(store, position.run_id)
        if current is not None and current[0].version >= position.version:
            return current[0]
        wanted = Release(
            run_id=position.run_id,
            version=position.version,
            sha256=position.sha256,
            state=position.state,
            step=position.step,
            released_at=timestamp(),
            proved_by=tuple(proved),
        )
        try:
            body = bytearray(wanted.to_bytes())
            if current is None:
                store.put(RELEASE_KEY, body, if_absent=True)
            else:
                store.put(RELEASE_KEY, body, if_match=current[1])
            return wanted
        except (PreconditionFailed, StoreUnavailable) as error:
            log.info("%s: not moved yet (%s); reading it again", RELEASE_KEY, error)
    raise NotAcknowledged(f"{store.url}/{RELEASE_KEY}: could not be moved in {RELEASE_TRIES} tries; try again")
