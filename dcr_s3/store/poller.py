"""Conditional reads on an event loop, for any store."""

from __future__ import annotations

import asyncio
from typing import Protocol, runtime_checkable

from dcr_s3.store.base import Object, Poller, Store


@runtime_checkable
class SupportsPoller(Protocol):
    """A store that has a better poller than a thread for each read."""

    def open_poller(self) -> Poller:
        """A new poller; the caller closes it."""


class ThreadPoller:
    """A :class:`~dcr_s3.store.base.Poller` that runs :meth:`Store.get` in worker threads."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def get(self, key: str, *, limit_bytes: int, if_none_match: str | None = None) -> Object | None:
        return await asyncio.to_thread(self._store.get, key, limit_bytes=limit_bytes, if_none_match=if_none_match)

    async def close(self) -> None:
        """Nothing to give back: the store is its owner's."""


def open_poller(store: Store) -> Poller:
    """A poller that reads what ``store`` reads. The caller closes it; the store stays open."""
    return store.open_poller() if isinstance(store, SupportsPoller) else ThreadPoller(store)
