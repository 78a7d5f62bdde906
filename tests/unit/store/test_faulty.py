from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from dcr_s3.errors import CorruptObject, PreconditionFailed, StoreUnavailable
from dcr_s3.store.memory import MemoryStore
from dcr_s3.testing.faults import Fault, FaultKind, FaultPlan, Struck
from dcr_s3.testing.faulty import FaultyStore

BODY = bytes(range(100))


def stored(inner: MemoryStore, key: str = "k") -> bytes:
    found = inner.get(key, limit_bytes=1000)
    assert found is not None
    return found.body


def differing_bits(left: bytes | bytearray, right: bytes | bytearray) -> int:
    assert len(left) == len(right)
    return sum((a ^ b).bit_count() for a, b in zip(left, right, strict=True))


def faulty(kind: FaultKind, *, request: str = "*") -> tuple[FaultyStore, MemoryStore]:
    inner = MemoryStore()
    inner.put("k", BODY)
    return FaultyStore(inner, FaultPlan([Fault(kind, request, "k")])), inner


def test_unavailable_does_nothing() -> None:
    store, inner = faulty(FaultKind.UNAVAILABLE)
    with pytest.raises(StoreUnavailable):
        store.put("k", b"new")
    assert stored(inner) == BODY
    store.put("k", b"new")
    assert stored(inner) == b"new"
    assert store.plan.struck == [Struck(FaultKind.UNAVAILABLE, "put", "k")]


def test_lost_reply_did_happen() -> None:
    store, inner = faulty(FaultKind.LOST_REPLY)
    with pytest.raises(StoreUnavailable):
        store.put("k", b"new")
    assert stored(inner) == b"new"


@pytest.mark.parametrize(("kind", "applied"), [(FaultKind.CONFLICT, False), (FaultKind.LATE_CONFLICT, True)])
def test_conflicts_strike_conditional_puts_only(kind: FaultKind, applied: bool) -> None:
    store, inner = faulty(kind)
    etag = store.put("k", b"old")
    with pytest.raises(PreconditionFailed):
        store.put("k", b"new", if_match=etag)
    assert stored(inner) == (b"new" if applied else b"old")


def test_short_body_leaves_half_a_buffer() -> None:
    store, _ = faulty(FaultKind.SHORT_BODY)
    buffer = bytearray(b"z" * 100)
    with pytest.raises(StoreUnavailable):
        store.read_into("k", 0, memoryview(buffer))
    assert buffer == BODY[:50] + bytes(50)
    store.read_into("k", 0, memoryview(buffer))
    assert buffer == BODY


def test_short_body_of_a_whole_object() -> None:
    store, _ = faulty(FaultKind.SHORT_BODY)
    with pytest.raises(StoreUnavailable):
        store.get("k", limit_bytes=1000)


def test_truncated_object() -> None:
    store, _ = faulty(FaultKind.TRUNCATED, request="get")
    found = store.get("k", limit_bytes=1000)
    assert found is not None
    assert found.body == BODY[:50]
    store, _ = faulty(FaultKind.TRUNCATED, request="read")
    with pytest.raises(CorruptObject):
        store.read_into("k", 0, memoryview(bytearray(100)))


@pytest.mark.parametrize("act", ["get", "read", "put", "upload_part"])
def test_flipped_bit(act: str) -> None:
    store, inner = faulty(FaultKind.FLIPPED_BIT, request=act)
    buffer = bytearray(100)

    def upload() -> bytes:
        parts = store.open_multipart("k")
        parts.upload_part(1, bytearray(BODY))
        parts.complete()
        return stored(inner)

    def get() -> bytes:
        found = store.get("k", limit_bytes=1000)
        assert found is not None
        return found.body

    ways: dict[str, Callable[[], bytes | bytearray]] = {
        "get": get,
        "read": lambda: store.read_into("k", 0, memoryview(buffer)) or buffer,
        "put": lambda: (store.put("k", BODY), stored(inner))[1],
        "upload_part": upload,
    }
    assert differing_bits(ways[act](), BODY) == 1
    assert differing_bits(ways[act](), BODY) == 0


def test_flipped_upload_leaves_the_callers_body_alone() -> None:
    store, _ = faulty(FaultKind.FLIPPED_BIT)
    body = bytearray(BODY)
    store.put("k", body)
    assert body == BODY


def test_delay() -> None:
    slept: list[float] = []
    inner = MemoryStore()
    store = FaultyStore(inner, FaultPlan([Fault(FaultKind.DELAY)]), delay_s=3.0, sleep=slept.append)
    store.put("k", BODY)
    assert slept == [3.0]
    assert stored(inner) == BODY


def test_script_skips_and_repeats() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, FaultPlan([Fault(FaultKind.UNAVAILABLE, "put", "m/*", skip=1, times=2)]))
    outcomes = []
    for number in range(5):
        store.put(f"other/{number}", b"")
        try:
            store.put(f"m/{number}", b"")
            outcomes.append("ok")
        except StoreUnavailable:
            outcomes.append("failed")
    assert outcomes == ["ok", "failed", "failed", "ok", "ok"]


def by_chance(seed: int, threads: int) -> set[Struck]:
    store = FaultyStore(
        MemoryStore(), FaultPlan(seed=seed, rate=0.3, kinds=[FaultKind.UNAVAILABLE, FaultKind.LOST_REPLY])
    )

    def put(number: int) -> None:
        try:
            store.put(f"k{number}", BODY)
        except StoreUnavailable:
            pass

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(put, range(200)))
    return set(store.plan.struck)


def test_chance_depends_on_the_seed_and_not_on_threads() -> None:
    assert by_chance(1, threads=1) == by_chance(1, threads=8)
    assert by_chance(1, threads=1) != by_chance(2, threads=1)
    assert 30 <= len(by_chance(1, threads=1)) <= 90


def test_disabled() -> None:
    store = FaultyStore(MemoryStore(), FaultPlan(rate=1.0, kinds=[FaultKind.UNAVAILABLE]))
    with pytest.raises(StoreUnavailable):
        store.put("k", BODY)
    store.plan.enabled = False
    store.put("k", BODY)
