"""Reading from the nearest place that has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcr_s3.errors import NotFound, StoreUnavailable
from dcr_s3.format.keys import manifest_key
from dcr_s3.store.memory import MemoryStore
from dcr_s3.store.metered import MeteredStore
from dcr_s3.store.nearby import NearbyStore
from dcr_s3.testing.faults import Fault, FaultKind, FaultPlan
from dcr_s3.testing.faulty import FaultyStore
from dcr_s3.world import World, living_in


class Clock(World):
    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


KEY = manifest_key(1)


def test_the_near_copy_serves_and_home_is_left_alone() -> None:
    near, home = MemoryStore(), MeteredStore(MemoryStore())
    near.put(KEY, b"body")
    store = NearbyStore(home, [near])
    found = store.get(KEY, limit_bytes=10)
    assert found is not None
    assert found.body == b"body"
    buffer = bytearray(4)
    store.read_into(KEY, 0, memoryview(buffer))
    assert (buffer, store.head(KEY).size_bytes) == (b"body", 4)
    assert home.meter.traffic.total_requests == 0


def test_a_relay_gets_its_time_before_home_is_read() -> None:
    near, home = MemoryStore(), MeteredStore(MemoryStore())
    store = NearbyStore(home, [near], patience_s=30.0)
    clock = Clock()
    with living_in(clock):
        home.put(KEY, b"body")
        for _ in range(20):
            with pytest.raises(NotFound):
                store.get(KEY, limit_bytes=10)
            clock.now += 1.0
        assert home.meter.traffic.down_bytes == 0
        assert home.meter.traffic.requests["head"] == 1
        clock.now += 11.0
        assert store.get(KEY, limit_bytes=10) is not None


def test_waiting_for_what_nobody_has_costs_home_next_to_nothing() -> None:
    near, home = MemoryStore(), MeteredStore(MemoryStore())
    store = NearbyStore(home, [near], patience_s=30.0)
    clock = Clock()
    with living_in(clock):
        for _ in range(300):
            with pytest.raises(NotFound):
                store.get(KEY, limit_bytes=10)
            clock.now += 1.0
    assert home.meter.traffic.total_requests <= 41


def test_a_committed_object_missing_nearby_is_read_at_home() -> None:
    near, home = MemoryStore(), MemoryStore()
    home.put("segments/1", b"body")
    buffer = bytearray(4)
    NearbyStore(home, [near]).read_into("segments/1", 0, memoryview(buffer))
    assert buffer == b"body"


def test_a_near_copy_out_of_reach_is_passed_over(tmp_path: Path) -> None:
    plan = FaultPlan([Fault(FaultKind.UNAVAILABLE, times=10**6)])
    home = MemoryStore()
    home.put(KEY, b"body")
    store = NearbyStore(home, [FaultyStore(MemoryStore(), plan)])
    assert store.get(KEY, limit_bytes=10) is not None
    with pytest.raises(NotFound):
        store.get(manifest_key(2), limit_bytes=10)
    with pytest.raises(StoreUnavailable):
        FaultyStore(MemoryStore(), plan).get(KEY, limit_bytes=10)


def test_writes_and_listings_are_homes() -> None:
    near, home = MemoryStore(), MemoryStore()
    store = NearbyStore(home, [near])
    store.put("acks/me.json", b"x")
    assert [o.key for o in store.list("")] == ["acks/me.json"]
    assert list(near.list("")) == []


def test_what_is_old_at_home_is_read_there_at_once() -> None:
    """As it must be by a process that starts anew for each pull."""
    clock = Clock()
    home = MemoryStore()
    with living_in(clock):
        home.put(KEY, b"body")
        clock.now += 31.0
        assert NearbyStore(home, [MemoryStore()], patience_s=30.0).get(KEY, limit_bytes=10) is not None
