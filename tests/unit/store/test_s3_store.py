"""What only shows against a server: prefixes, lost replies, broken connections."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from dcr_s3.errors import BucketMissing, Forbidden, NotFound, PreconditionFailed, StoreUnavailable
from dcr_s3.store import open_poller, open_store
from dcr_s3.store.base import MIN_PART_BYTES
from dcr_s3.store.s3 import S3Store
from dcr_s3.testing.faults import Fault, FaultKind, FaultPlan
from dcr_s3.testing.proxy import FaultyProxy
from dcr_s3.testing.servers import EmbeddedS3, SeaweedServer

BODY = bytes(range(256)) * 1000


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)


def behind(proxy: FaultyProxy, store: S3Store) -> S3Store:
    """The same prefix, seen through a proxy."""
    return S3Store(replace(store.address, endpoint_url=proxy.endpoint_url))


def test_url_from_the_environment(moto_url: str) -> None:
    store = open_store(moto_url)
    store.put("k", b"x")
    assert store.url == moto_url
    found = open_store(moto_url.rpartition("/")[0]).head(f"{moto_url.rpartition('/')[2]}/k")
    assert found.size_bytes == 1


def test_completion_whose_reply_was_lost(moto_store: S3Store) -> None:
    plan = FaultPlan([Fault(FaultKind.LOST_REPLY, "POST", skip=1)])
    with FaultyProxy(moto_store.client.meta.endpoint_url, plan) as proxy:
        upload = behind(proxy, moto_store).open_multipart("k")
        upload.upload_part(1, bytearray(MIN_PART_BYTES))
        upload.upload_part(2, bytearray(b"end"))
        etag = upload.complete()
    assert len(plan.struck) == 1
    assert moto_store.head("k").etag == etag


def test_commit_whose_reply_was_lost(seaweed_store: S3Store) -> None:
    """The client's own repeat of a conditional put is refused: its writer must read back."""
    plan = FaultPlan([Fault(FaultKind.LOST_REPLY, "PUT")])
    with FaultyProxy(seaweed_store.client.meta.endpoint_url, plan) as proxy, pytest.raises(PreconditionFailed):
        behind(proxy, seaweed_store).put("k", b"mine", if_absent=True)
    found = seaweed_store.get("k", limit_bytes=10)
    assert found is not None
    assert found.body == b"mine"


@pytest.mark.parametrize("kind", [FaultKind.SHORT_BODY, FaultKind.LOST_REPLY, FaultKind.UNAVAILABLE])
def test_reads_survive_the_network(seaweed_store: S3Store, kind: FaultKind) -> None:
    seaweed_store.put("k", BODY)
    plan = FaultPlan([Fault(kind, "GET", times=2)])
    with FaultyProxy(seaweed_store.client.meta.endpoint_url, plan) as proxy:
        store = behind(proxy, seaweed_store)
        buffer = bytearray(len(BODY))
        store.read_into("k", 0, memoryview(buffer))
        assert buffer == BODY
        assert len(plan.struck) == 2


@pytest.mark.parametrize("kind", [FaultKind.SHORT_BODY, FaultKind.LOST_REPLY, FaultKind.UNAVAILABLE])
def test_polls_survive_the_network(seaweed_store: S3Store, kind: FaultKind) -> None:
    seaweed_store.put("k", BODY)
    plan = FaultPlan([Fault(kind, "GET", times=2)])

    async def poll(store: S3Store) -> bytes:
        poller = open_poller(store)
        found = await poller.get("k", limit_bytes=len(BODY))
        await poller.close()
        assert found is not None
        return found.body

    with FaultyProxy(seaweed_store.client.meta.endpoint_url, plan) as proxy:
        assert asyncio.run(poll(behind(proxy, seaweed_store))) == BODY
        assert len(plan.struck) == 2


def test_a_reply_of_not_found_that_breaks_off_is_asked_for_again(seaweed_store: S3Store) -> None:
    async def poll(store: S3Store) -> None:
        poller = open_poller(store)
        try:
            await poller.get("absent", limit_bytes=9)
        finally:
            await poller.close()

    for ask in (lambda store: store.get("absent", limit_bytes=9), lambda store: asyncio.run(poll(store))):
        plan = FaultPlan([Fault(FaultKind.SHORT_BODY, "GET", times=2)])
        with FaultyProxy(seaweed_store.client.meta.endpoint_url, plan) as proxy, pytest.raises(NotFound):
            ask(behind(proxy, seaweed_store))
        assert len(plan.struck) == 2


def test_bits_that_flip_on_the_way_up_are_sent_again(seaweed_store: S3Store) -> None:
    plan = FaultPlan([Fault(FaultKind.FLIPPED_BIT, "PUT", times=2)])
    with FaultyProxy(seaweed_store.client.meta.endpoint_url, plan) as proxy:
        behind(proxy, seaweed_store).put("k", BODY)
        assert len(plan.struck) == 2
    found = seaweed_store.get("k", limit_bytes=len(BODY))
    assert found is not None
    assert found.body == BODY


def test_network_that_stays_broken(seaweed_store: S3Store) -> None:
    seaweed_store.put("k", BODY)
    with FaultyProxy(
        seaweed_store.client.meta.endpoint_url, FaultPlan([Fault(FaultKind.SHORT_BODY, times=99)])
    ) as proxy:
        store = behind(proxy, seaweed_store)
        with pytest.raises(StoreUnavailable, match="several times"):
            store.read_into("k", 0, memoryview(bytearray(len(BODY))))

        async def poll() -> None:
            poller = open_poller(store)
            try:
                await poller.get("k", limit_bytes=len(BODY))
            finally:
                await poller.close()

        with pytest.raises(StoreUnavailable, match="several times"):
            asyncio.run(poll())
    with pytest.raises(StoreUnavailable, match=r"no answer from http://127\.0\.0\.1"):
        store.head("k")
    with pytest.raises(StoreUnavailable, match=r"no answer from http://127\.0\.0\.1"):
        asyncio.run(poll())


def test_wrong_credentials(seaweed_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    with pytest.raises(Forbidden, match="secret key") as caught:
        open_store(seaweed_url).put("k", b"x")
    assert "hunter2" not in str(caught.value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(Forbidden, match="access key is unknown"):
        open_store(seaweed_url).put("k", b"x")


@pytest.mark.parametrize("name", ["moto_server", "seaweed_server"])
def test_missing_bucket(name: str, request: pytest.FixtureRequest) -> None:
    server: EmbeddedS3 | SeaweedServer = request.getfixturevalue(name)
    store = S3Store(server.address("no-such-bucket", "run"))
    with pytest.raises(BucketMissing, match="s3://no-such-bucket/run"):
        store.get("k", limit_bytes=1)
    with pytest.raises(BucketMissing):
        store.put("k", b"", if_absent=True)
    with pytest.raises(BucketMissing):
        list(store.list(""))
    with pytest.raises(BucketMissing):
        store.open_multipart("k")
