from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from dcr_s3.errors import NotFound, PreconditionFailed
from dcr_s3.store import open_poller
from dcr_s3.store.memory import MemoryStore
from dcr_s3.store.metered import MeteredStore
from dcr_s3.store.s3 import S3Store


def test_counts_requests_and_bytes() -> None:
    store = MeteredStore(MemoryStore())
    etag = store.put("k", bytes(10))
    with pytest.raises(PreconditionFailed):
        store.put("k", bytes(5), if_absent=True)
    store.get("k", limit_bytes=10)
    store.get("k", limit_bytes=10, if_none_match=etag)
    store.read_into("k", 2, memoryview(bytearray(3)))
    store.head("k")
    with pytest.raises(NotFound):
        store.head("none")
    upload = store.open_multipart("m")
    upload.upload_part(1, bytearray(7))
    upload.complete()
    list(store.list(""))
    store.delete(["k", "m"])
    traffic = store.meter.traffic
    assert traffic.requests == Counter(
        put=2, get=2, read=1, head=2, open_multipart=1, upload_part=1, complete=1, list=1, delete=1
    )
    assert traffic.total_requests == 12
    assert (traffic.up_bytes, traffic.down_bytes) == (10 + 5 + 7, 10 + 3)


def test_difference() -> None:
    store = MeteredStore(MemoryStore())
    store.put("k", bytes(10))
    before = store.meter.traffic
    store.put("k", bytes(3))
    store.get("k", limit_bytes=3)
    since = store.meter.traffic - before
    assert since.requests == Counter(put=1, get=1)
    assert (since.up_bytes, since.down_bytes) == (3, 3)


def test_counts_from_threads() -> None:
    store = MeteredStore(MemoryStore())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: store.put(f"k{number}", bytes(3)), range(500)))
    assert store.meter.traffic.requests["put"] == 500
    assert store.meter.traffic.up_bytes == 1500


@pytest.mark.parametrize("name", ["memory_store", "moto_store"])
def test_counts_polls(name: str, request: pytest.FixtureRequest) -> None:
    inner: MemoryStore | S3Store = request.getfixturevalue(name)
    etag = inner.put("k", bytes(10))
    store = MeteredStore(inner)

    async def poll() -> None:
        poller = open_poller(store)
        await poller.get("k", limit_bytes=10)
        await poller.get("k", limit_bytes=10, if_none_match=etag)
        with pytest.raises(NotFound):
            await poller.get("none", limit_bytes=10)
        await poller.close()

    asyncio.run(poll())
    assert store.meter.traffic.requests == Counter(get=3)
    assert store.meter.traffic.down_bytes == 10


def test_listing_counts_pages() -> None:
    inner = MemoryStore()
    for number in range(2500):
        inner.put(f"k{number:04d}", b"")
    store = MeteredStore(inner)
    assert len(list(store.list(""))) == 2500
    store.delete([f"k{number:04d}" for number in range(2500)])
    assert store.meter.traffic.requests == Counter(list=3, delete=3)
