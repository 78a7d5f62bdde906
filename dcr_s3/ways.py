"""From version to version: along the chain, or the cheapest way that the bucket offers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Protocol, TypeVar

from dcr_s3.catalogue import Catalogue, read_catalogue
from dcr_s3.errors import ChainBroken, Forbidden, ObjectGone
from dcr_s3.format.manifest import Manifest
from dcr_s3.protocol.plan import Edge, cheapest
from dcr_s3.protocol.position import Position
from dcr_s3.reading import fetch_manifest, is_committed
from dcr_s3.store.base import Store
from dcr_s3.world import world

log = logging.getLogger(__name__)

FAR_BEHIND = 4
"""From so many versions on, something cheaper than the chain is looked for."""

PLANS = 5
"""How often a way is looked for again because objects were deleted meanwhile."""

T_co = TypeVar("T_co", covariant=True)


class Traveller(Protocol[T_co]):
    """What moves along a run. Both methods move ``position`` and raise ``ObjectGone`` if something was deleted."""

    @property
    def position(self) -> Position:
        """Where it stands."""

    def apply(self, manifest: Manifest, target: Position, manifest_bytes: int, *, poll_s: float) -> T_co:
        """Takes the step that a manifest describes, which leads to ``target`` and took ``poll_s`` to read."""

    def take(self, edge: Edge, catalogue: Catalogue) -> T_co:
        """Takes a step that a catalogue offers."""


class Ways:
    """Leads travellers along one run, whose version 0 is ``start``."""

    def __init__(self, store: Store, start: Position, fetchers: Executor) -> None:
        self._store = store
        self._start = start
        self._fetchers = fetchers

    def catch_up(self, traveller: Traveller[T_co], *, to_version: int | None = None) -> Iterator[T_co]:
        """Step after step until no version is left (or ``to_version`` is reached).

        Who is several versions behind, or whose next version was deleted, goes the cheapest way that the bucket offers
        instead. Raises ``ChainBroken`` if there is none.
        """
        looked = False
        while to_version is None or traveller.position.version < to_version:
            begun = world().monotonic()
            found = fetch_manifest(self._store, traveller.position)
            if found is None:
                return
            if not looked and self._is_far_behind(traveller.position, to_version):
                yield from self._go_cheapest(traveller, to_version)
            else:
                manifest, target, size = found
                try:
                    step = traveller.apply(manifest, target, size, poll_s=world().monotonic() - begun)
                except ObjectGone as error:
                    log.info("%s; looking for another way", error)
                    yield from self._go_cheapest(traveller, to_version, must=error)
                else:
                    yield step
            looked = True

    def _is_far_behind(self, position: Position, to_version: int | None) -> bool:
        version = position.version + FAR_BEHIND
        return (to_version is None or version <= to_version) and is_committed(self._store, version)

    def _go_cheapest(
        self, traveller: Traveller[T_co], to_version: int | None, *, must: ChainBroken | None = None
    ) -> Iterator[T_co]:
        """Takes the cheapest way to the newest version. What is deleted meanwhile leads to another plan.

        ``must``: why the plain chain is no way.
        """
        for _ in range(PLANS):
            try:
                catalogue = read_catalogue(self._store, self._start, traveller.position, self._fetchers)
            except Forbidden as error:
                if must is not None:
                    raise must from error
                log.info("listing is not allowed (%s); going version by version", error)
                return
            wanted = catalogue.newest if to_version is None else min(to_version, catalogue.newest)
            path = cheapest(catalogue.edges, traveller.position.version, wanted)
            if path is None:
                raise ChainBroken(
                    f"{self._store.url}: no way leads from version {traveller.position.version} to {wanted} "
                    f"({must or 'deltas between them were deleted'}), and there is no snapshot; publish one from a "
                    "mirror that is newer"
                )
            if not path and must is not None:
                raise must
            try:
                for edge in path:
                    yield traveller.take(edge, catalogue)
                return
            except ObjectGone as error:
                log.info("%s; looking for another way", error)
                must = error
        raise must or ChainBroken(f"{self._store.url}: objects disappear faster than they are read")
