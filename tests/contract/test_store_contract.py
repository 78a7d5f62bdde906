"""Every store, and every wrapper, keeps the same contract."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from dcr_s3.store import Store
from dcr_s3.store.memory import MemoryStore
from dcr_s3.store.metered import MeteredStore
from dcr_s3.store.s3 import S3Store
from dcr_s3.store.throttled import ThrottledStore
from dcr_s3.testing.faults import FaultPlan
from dcr_s3.testing.faulty import FaultyStore
from dcr_s3.testing.store_contract import StoreContract


def _flip_a_bit(request: Any, **_: object) -> None:
    changed = bytearray(request.body)
    changed[len(changed) // 2] ^= 1
    request.body = changed


class _S3Contract(StoreContract):
    @contextlib.contextmanager
    def damaged_uploads(self, store: Store) -> Iterator[None]:
        assert isinstance(store, S3Store)
        events = store.client.meta.events
        events.register("before-send.s3", _flip_a_bit)
        try:
            yield
        finally:
            events.unregister("before-send.s3", _flip_a_bit)


class TestMemoryStore(StoreContract):
    verifies_checksums = False  # nothing travels

    @pytest.fixture
    def store(self, memory_store: MemoryStore) -> Store:
        return memory_store


class TestMemoryStoreWithPrefix(TestMemoryStore):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore(prefix="some/run")


class TestWrappedStore(TestMemoryStore):
    """A store inside every wrapper at once, none of which disturbs it."""

    @pytest.fixture
    def store(self, memory_store: MemoryStore) -> Store:
        return MeteredStore(ThrottledStore(FaultyStore(memory_store, FaultPlan()), bytes_per_s=1e12))


class TestMotoStore(_S3Contract):
    dates_uploads = False  # moto says 2010 of every upload

    @pytest.fixture
    def store(self, moto_store: S3Store) -> Store:
        return moto_store


class TestSeaweedStore(_S3Contract):
    sorts_across_slashes = False  # SeaweedFS lists a folder's content where the folder's name sorts

    @pytest.fixture
    def store(self, seaweed_store: S3Store) -> Store:
        return seaweed_store
