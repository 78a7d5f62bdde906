"""What every store must do, as tests. Subclass in a test module and give it a ``store`` fixture:

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self) -> Store:
            return MyStore(...)  # empty, of this test alone

Flags say where a store is known to fall short; all else is required.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TypeVar

import pytest

from dcr_s3.errors import BadInput, CorruptObject, DcrError, NotFound, PreconditionFailed, StoreUnavailable
from dcr_s3.store import Object, Poller, Store, open_poller
from dcr_s3.store.base import MIN_PART_BYTES

R = TypeVar("R")

_LIMIT = 1 << 20
_RACERS = 8
_ROUNDS = 6


class StoreContract:
    """The suite. Each test gets an empty store."""

    verifies_checksums = True
    """The store refuses a body that was damaged on its way. Needs :meth:`damaged_uploads`."""
    dates_uploads = True
    """``started_at`` of an abandoned upload is a time, not a constant."""
    sorts_across_slashes = True
    """Keys are listed in the order of their bytes, also where one continues with ``/`` and another with ``-``."""

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError("give a store fixture")

    def damaged_uploads(self, store: Store) -> AbstractContextManager[None]:
        """While open, one bit of every body that is put changes after its checksum was taken."""
        raise NotImplementedError("override damaged_uploads, or set verifies_checksums to False")

    # whole objects

    @pytest.mark.parametrize("body", [b"", b"x", bytes(range(256)) * 300])
    def test_put_then_get(self, store: Store, body: bytes) -> None:
        etag = store.put("a/b", bytearray(body))
        assert store.get("a/b", limit_bytes=len(body)) == Object(body, etag)
        info = store.head("a/b")
        assert (info.key, info.size_bytes, info.etag) == ("a/b", len(body), etag)
        assert abs(info.modified_at - time.time()) < 60

    def test_put_replaces(self, store: Store) -> None:
        first = store.put("k", b"one")
        second = store.put("k", b"two")
        assert first != second
        assert store.get("k", limit_bytes=_LIMIT) == Object(b"two", second)

    def test_missing_keys(self, store: Store) -> None:
        for look in (
            lambda: store.get("none", limit_bytes=_LIMIT),
            lambda: store.get("none", limit_bytes=_LIMIT, if_none_match='"0"'),
            lambda: store.head("none"),
            lambda: store.read_into("none", 0, memoryview(bytearray(1))),
        ):
            with pytest.raises(NotFound, match="none"):
                look()

    def test_unchanged_object_is_not_sent(self, store: Store) -> None:
        etag = store.put("k", b"one")
        assert store.get("k", limit_bytes=_LIMIT, if_none_match=etag) is None
        changed = store.put("k", b"two")
        assert store.get("k", limit_bytes=_LIMIT, if_none_match=etag) == Object(b"two", changed)

    def test_object_larger_than_expected(self, store: Store) -> None:
        store.put("k", b"12345")
        with pytest.raises(CorruptObject, match=r"k.* 5 .* 4"):
            store.get("k", limit_bytes=4)

    @pytest.mark.parametrize("key", ["a b", "a+b%20c", "ü/é/漢", "q?x=1&y=2#z", "'\"<>", "=~!$(*)", "a..b"])
    def test_keys_are_arbitrary_text(self, store: Store, key: str) -> None:
        etag = store.put(key, b"body")
        assert store.get(key, limit_bytes=_LIMIT) == Object(b"body", etag)
        assert [entry.key for entry in store.list("")] == [key]
        store.delete([key])
        assert list(store.list("")) == []

    def test_delete(self, store: Store) -> None:
        for key in ("a", "b", "c"):
            store.put(key, b"x")
        store.delete(["a", "c", "never-was"])
        store.delete([])
        assert [entry.key for entry in store.list("")] == ["b"]

    # conditions

    def test_create_only_where_nothing_is(self, store: Store) -> None:
        etag = store.put("k", b"first", if_absent=True)
        with pytest.raises(PreconditionFailed):
            store.put("k", b"second", if_absent=True)
        assert store.get("k", limit_bytes=_LIMIT) == Object(b"first", etag)
        store.delete(["k"])
        store.put("k", b"third", if_absent=True)

    def test_compare_and_set(self, store: Store) -> None:
        first = store.put("k", b"first")
        second = store.put("k", b"second", if_match=first)
        with pytest.raises(PreconditionFailed):
            store.put("k", b"third", if_match=first)
        assert store.get("k", limit_bytes=_LIMIT) == Object(b"second", second)

    def test_compare_and_set_of_a_missing_object(self, store: Store) -> None:
        etag = store.put("k", b"first")
        store.delete(["k"])
        with pytest.raises(PreconditionFailed):
            store.put("k", b"second", if_match=etag)
        with pytest.raises(NotFound):
            store.head("k")

    def test_racing_creates_have_one_winner(self, store: Store) -> None:
        for number in range(_ROUNDS):
            key = f"race/{number}"

            def create(racer: int, key: str = key) -> str:
                return store.put(key, f"racer {racer}".encode(), if_absent=True)

            self._require_one_winner(store, key, _race(create))

    def test_racing_compare_and_sets_have_one_winner(self, store: Store) -> None:
        etag = store.put("k", b"start")
        for number in range(_ROUNDS):

            def replace(racer: int, number: int = number, etag: str = etag) -> str:
                return store.put("k", f"round {number} racer {racer}".encode(), if_match=etag)

            etag = self._require_one_winner(store, "k", _race(replace))

    def _require_one_winner(self, store: Store, key: str, outcomes: list[str | Exception]) -> str:
        winners = [(racer, etag) for racer, etag in enumerate(outcomes) if isinstance(etag, str)]
        losers = [outcome for outcome in outcomes if isinstance(outcome, PreconditionFailed)]
        assert len(winners) == 1, outcomes
        assert len(losers) == _RACERS - 1, outcomes
        (racer, etag) = winners[0]
        found = store.get(key, limit_bytes=_LIMIT)
        assert found is not None
        assert found.etag == etag
        assert found.body.endswith(f"racer {racer}".encode())
        return etag

    def test_damaged_upload_is_refused(self, store: Store) -> None:
        if not self.verifies_checksums:
            pytest.skip("this store does not verify checksums")
        with self.damaged_uploads(store), pytest.raises(StoreUnavailable, match="damaged"):
            store.put("k", b"precious")
        with pytest.raises(NotFound):
            store.head("k")
        upload = store.open_multipart("m")
        with self.damaged_uploads(store), pytest.raises(StoreUnavailable, match="damaged"):
            upload.upload_part(1, bytearray(b"precious"))
        upload.abort()

    # ranges

    @pytest.mark.parametrize(("start", "size"), [(0, 1), (0, 1000), (123, 456), (999, 1), (500, 500), (7, 0)])
    def test_read_range(self, store: Store, start: int, size: int) -> None:
        body = random.Random(1).randbytes(1000)
        store.put("k", body)
        buffer = bytearray(size)
        store.read_into("k", start, memoryview(buffer))
        assert buffer == body[start : start + size]

    @pytest.mark.parametrize(("start", "size"), [(0, 1001), (999, 2), (1000, 1), (5000, 10)])
    def test_read_past_the_end(self, store: Store, start: int, size: int) -> None:
        store.put("k", bytes(1000))
        with pytest.raises(CorruptObject, match="k"):
            store.read_into("k", start, memoryview(bytearray(size)))

    def test_reads_from_many_threads(self, store: Store) -> None:
        body = random.Random(2).randbytes(1 << 20)
        store.put("k", body)
        buffer = bytearray(len(body))
        step = len(body) // 16

        def read(start: int) -> None:
            store.read_into("k", start, memoryview(buffer)[start : start + step])

        with ThreadPoolExecutor(_RACERS) as pool:
            list(pool.map(read, range(0, len(body), step)))
        assert buffer == body

    # multipart uploads

    def test_parts_from_threads_out_of_order(self, store: Store) -> None:
        parts = [bytearray(random.Random(number).randbytes(MIN_PART_BYTES)) for number in range(3)]
        parts.append(bytearray(b"the end"))
        upload = store.open_multipart("big")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda number: upload.upload_part(number, parts[number - 1]), [3, 4, 1, 2]))
        with pytest.raises(NotFound):
            store.head("big")
        assert list(store.list("")) == []
        etag = upload.complete()
        info = store.head("big")
        assert (info.size_bytes, info.etag) == (sum(map(len, parts)), etag)
        buffer = bytearray(info.size_bytes)
        store.read_into("big", 0, memoryview(buffer))
        assert buffer == b"".join(parts)

    def test_one_small_part_is_enough(self, store: Store) -> None:
        upload = store.open_multipart("k")
        upload.upload_part(1, bytearray(b"all of it"))
        etag = upload.complete()
        assert store.get("k", limit_bytes=_LIMIT) == Object(b"all of it", etag)

    def test_part_sent_again_replaces(self, store: Store) -> None:
        upload = store.open_multipart("k")
        upload.upload_part(1, bytearray(b"wrong"))
        upload.upload_part(1, bytearray(b"right, and longer"))
        upload.complete()
        found = store.get("k", limit_bytes=_LIMIT)
        assert found is not None
        assert found.body == b"right, and longer"

    def test_small_part_before_the_last(self, store: Store) -> None:
        upload = store.open_multipart("k")
        upload.upload_part(1, bytearray(MIN_PART_BYTES - 1))
        upload.upload_part(2, bytearray(1))
        with pytest.raises(BadInput, match="part"):
            upload.complete()
        upload.abort()

    @pytest.mark.parametrize("numbers", [(), (2,), (1, 3)])
    def test_part_numbers_have_no_gap(self, store: Store, numbers: tuple[int, ...]) -> None:
        upload = store.open_multipart("k")
        for number in numbers:
            upload.upload_part(number, bytearray(1))
        with pytest.raises(BadInput, match="without a gap"):
            upload.complete()
        upload.abort()

    def test_abort_leaves_nothing(self, store: Store) -> None:
        upload = store.open_multipart("k")
        upload.upload_part(1, bytearray(b"x"))
        upload.abort()
        upload.abort()
        with pytest.raises(NotFound):
            store.head("k")
        assert list(store.list_uploads("")) == []

    def test_use_after_the_end_is_an_error(self, store: Store) -> None:
        aborted = store.open_multipart("aborted")
        aborted.abort()
        completed = store.open_multipart("completed")
        completed.upload_part(1, bytearray(b"x"))
        completed.complete()
        for upload in (aborted, completed):
            with pytest.raises(DcrError, match=r"completed or aborted"):
                upload.upload_part(1, bytearray(b"y"))
            with pytest.raises(DcrError, match=r"completed or aborted"):
                upload.complete()
        completed.abort()
        assert store.head("completed").size_bytes == 1

    def test_upload_aborted_by_someone_else(self, store: Store) -> None:
        upload = store.open_multipart("k")
        upload.upload_part(1, bytearray(b"x"))
        for found in store.list_uploads(""):
            found.abort()
            found.abort()
        with pytest.raises(DcrError, match="k"):
            upload.upload_part(1, bytearray(b"y"))
        with pytest.raises(DcrError, match="k"):
            upload.complete()
        upload.abort()
        with pytest.raises(NotFound):
            store.head("k")

    def test_list_uploads(self, store: Store) -> None:
        for key in ("run/b", "run/a", "other"):
            store.open_multipart(key).upload_part(1, bytearray(b"x"))
        found = sorted(store.list_uploads("run/"), key=lambda upload: upload.key)
        assert [upload.key for upload in found] == ["run/a", "run/b"]
        if self.dates_uploads:
            assert all(abs(upload.started_at - time.time()) < 60 for upload in found)
        found[0].abort()
        assert sorted(upload.key for upload in store.list_uploads("")) == ["other", "run/b"]

    def test_two_uploads_of_one_key(self, store: Store) -> None:
        first, second = store.open_multipart("k"), store.open_multipart("k")
        first.upload_part(1, bytearray(b"first"))
        second.upload_part(1, bytearray(b"second"))
        assert len(list(store.list_uploads("k"))) == 2
        first.complete()
        second.abort()
        found = store.get("k", limit_bytes=_LIMIT)
        assert found is not None
        assert found.body == b"first"

    # listing

    def test_list_in_order(self, store: Store) -> None:
        for key in ("b/2", "a", "b/10", "c", "b/1", "bb"):
            store.put(key, key.encode())
        listed = list(store.list("b/"))
        assert [(entry.key, entry.size_bytes) for entry in listed] == [("b/1", 3), ("b/10", 4), ("b/2", 3)]
        assert listed[0] == store.head("b/1")
        assert [entry.key for entry in store.list("b")] == ["b/1", "b/10", "b/2", "bb"]
        assert [entry.key for entry in store.list("")] == ["a", "b/1", "b/10", "b/2", "bb", "c"]
        assert list(store.list("zzz")) == []

    def test_list_order_across_slashes(self, store: Store) -> None:
        if not self.sorts_across_slashes:
            pytest.skip("this store does not sort across slashes")
        for key in ("a/x", "a-x", "a", "a0"):
            store.put(key, b"")
        assert [entry.key for entry in store.list("")] == ["a", "a-x", "a/x", "a0"]

    def test_list_start_after(self, store: Store) -> None:
        for number in range(5):
            store.put(f"m/{number}", b"")
        assert [entry.key for entry in store.list("m/", start_after="m/2")] == ["m/3", "m/4"]
        assert [entry.key for entry in store.list("m/", start_after="m/20")] == ["m/3", "m/4"]
        assert [entry.key for entry in store.list("m/", start_after="a")] == [f"m/{number}" for number in range(5)]
        assert list(store.list("m/", start_after="m/4")) == []

    def test_list_and_delete_more_than_a_page(self, store: Store) -> None:
        keys = [f"many/{number:05d}" for number in range(1010)]
        with ThreadPoolExecutor(_RACERS) as pool:
            list(pool.map(lambda key: store.put(key, b""), keys))
        assert [entry.key for entry in store.list("many/")] == keys
        assert [entry.key for entry in store.list("many/", start_after=keys[3])] == keys[4:]
        store.delete(keys)
        assert list(store.list("many/")) == []

    # polling

    def test_poller(self, store: Store) -> None:
        async def check(poller: Poller) -> None:
            with pytest.raises(NotFound, match="k"):
                await poller.get("k", limit_bytes=_LIMIT)
            etag = store.put("k", b"one")
            assert await poller.get("k", limit_bytes=_LIMIT) == Object(b"one", etag)
            assert await poller.get("k", limit_bytes=_LIMIT, if_none_match=etag) is None
            changed = store.put("k", b"two")
            assert await poller.get("k", limit_bytes=_LIMIT, if_none_match=etag) == Object(b"two", changed)
            with pytest.raises(CorruptObject, match=r"k.* 3 .* 2"):
                await poller.get("k", limit_bytes=2)
            store.put("empty", b"")
            empty = await poller.get("empty", limit_bytes=0)
            assert empty is not None
            assert empty.body == b""

        _with_poller(store, check)

    def test_poller_waits_on_many_things(self, store: Store) -> None:
        for number in range(20):
            store.put(f"k{number}", f"body {number}".encode())

        async def check(poller: Poller) -> None:
            found = await asyncio.gather(*(poller.get(f"k{number}", limit_bytes=_LIMIT) for number in range(20)))
            assert [one.body for one in found if one] == [f"body {number}".encode() for number in range(20)]

        _with_poller(store, check)


def _with_poller(store: Store, check: Callable[[Poller], Awaitable[None]]) -> None:
    async def run() -> None:
        poller = open_poller(store)
        try:
            await check(poller)
        finally:
            await poller.close()

    asyncio.run(run())


def _race(act: Callable[[int], R]) -> list[R | Exception]:
    """What each of several threads got that all started at the same moment."""
    barrier = threading.Barrier(_RACERS)

    def run(racer: int) -> R | Exception:
        barrier.wait()
        try:
            return act(racer)
        except Exception as error:
            return error

    with ThreadPoolExecutor(_RACERS) as pool:
        return list(pool.map(run, range(_RACERS)))
