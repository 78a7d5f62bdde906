from __future__ import annotations

from dcr_s3.store.memory import MemoryStore
from dcr_s3.store.throttled import Link, ThrottledStore


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        assert duration_s > 0
        self.now_s += duration_s


def throttled(clock: FakeClock, latency_s: float = 0.0) -> ThrottledStore:
    return ThrottledStore(MemoryStore(), bytes_per_s=1000, latency_s=latency_s, clock=clock, sleep=clock.sleep)


def test_link_passes_bytes_one_after_the_other() -> None:
    link = Link(bytes_per_s=100)
    assert link.reserve(50, now=10.0) == 10.5
    assert link.reserve(100, now=10.0) == 11.5
    assert link.reserve(0, now=11.0) == 11.5
    assert link.reserve(100, now=20.0) == 21.0


def test_each_way_takes_its_time() -> None:
    clock = FakeClock()
    store = throttled(clock)
    store.put("k", bytes(2000))
    assert clock.now_s == 102.0
    store.get("k", limit_bytes=2000)
    assert clock.now_s == 104.0
    store.read_into("k", 0, memoryview(bytearray(500)))
    assert clock.now_s == 104.5
    store.head("k")
    assert clock.now_s == 104.5


def test_latency_is_paid_once_per_request() -> None:
    clock = FakeClock()
    store = throttled(clock, latency_s=0.25)
    etag = store.put("k", bytes(1000))
    assert clock.now_s == 101.25
    store.get("k", limit_bytes=1000, if_none_match=etag)
    assert clock.now_s == 101.5
    upload = store.open_multipart("m")
    upload.upload_part(1, bytearray(1000))
    upload.complete()
    assert clock.now_s == 103.25


def test_bytes_are_on_their_way_before_the_store_has_them() -> None:
    clock = FakeClock()
    inner = MemoryStore()

    def sleep(duration_s: float) -> None:
        assert list(inner.list("")) == []
        clock.sleep(duration_s)

    ThrottledStore(inner, bytes_per_s=10, clock=clock, sleep=sleep).put("k", bytes(10))
    assert [entry.key for entry in inner.list("")] == ["k"]
