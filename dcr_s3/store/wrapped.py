"""A store over another, the base of those that measure it, slow it down or disturb it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeVar

from dcr_s3.store.base import AbandonedUpload, MultipartUpload, Object, ObjectInfo, Store

R = TypeVar("R")

RequestKind = Literal[
    "get", "read", "head", "put", "open_multipart", "upload_part", "complete", "abort", "list", "delete", "list_uploads"
]
_PAGE = 1000


@dataclass(frozen=True)
class Request:
    """One request to a store. ``body`` is what goes up, ``buffer`` what a read fills; ``number`` is a part's number or
    a read's first byte; ``conditional`` marks a put with a condition. ``key`` is a prefix for listings."""

    kind: RequestKind
    key: str
    body: bytes | bytearray | None = None
    buffer: memoryview | None = None
    number: int = 0
    conditional: bool = False

    @property
    def up_bytes(self) -> int:
        """Size of the body sent."""
        return 0 if self.body is None else len(self.body)

    def down_bytes(self, result: object) -> int:
        """Size of the body received, given what the request returned."""
        if isinstance(result, Object):
            return len(result.body)
        return 0 if self.buffer is None else len(self.buffer)


class WrappedStore:
    """A :class:`~dcr_s3.store.base.Store` over another. Subclasses change :meth:`around`."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def around(self, request: Request, send: Callable[[Request], R]) -> R:
        """Sends ``request`` (or one like it, another, or none) and returns its result. Called from any thread."""
        return send(request)

    @property
    def url(self) -> str:
        return self.inner.url

    def get(self, key: str, *, limit_bytes: int, if_none_match: str | None = None) -> Object | None:
        return self.around(
            Request("get", key),
            lambda request: self.inner.get(request.key, limit_bytes=limit_bytes, if_none_match=if_none_match),
        )

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        def send(request: Request) -> None:
            self.inner.read_into(request.key, request.number, buffer if request.buffer is None else request.buffer)

        self.around(Request("read", key, buffer=buffer, number=start), send)

    def head(self, key: str) -> ObjectInfo:
        return self.around(Request("head", key), lambda request: self.inner.head(request.key))

    def put(self, key: str, body: bytes | bytearray, *, if_absent: bool = False, if_match: str | None = None) -> str:
        def send(request: Request) -> str:
            sent = body if request.body is None else request.body
            return self.inner.put(request.key, sent, if_absent=if_absent, if_match=if_match)

        return self.around(Request("put", key, body=body, conditional=if_absent or if_match is not None), send)

    def open_multipart(self, key: str) -> MultipartUpload:
        inner = self.around(Request("open_multipart", key), lambda request: self.inner.open_multipart(request.key))
        return WrappedUpload(self, key, inner)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        return self._paged("list", prefix, self.inner.list(prefix, start_after=start_after))

    def list_uploads(self, prefix: str) -> Iterator[AbandonedUpload]:
        for upload in self._paged("list_uploads", prefix, self.inner.list_uploads(prefix)):
            yield WrappedAbandonedUpload(self, upload)

    def _paged(self, kind: RequestKind, prefix: str, entries: Iterator[R]) -> Iterator[R]:
        while True:
            page = self.around(Request(kind, prefix), lambda _: [*islice(entries, _PAGE)])
            yield from page
            if len(page) < _PAGE:
                return

    def delete(self, keys: Iterable[str]) -> None:
        wanted = [*keys]
        for first in range(0, len(wanted), _PAGE):
            self._delete_page(wanted[first : first + _PAGE])

    def _delete_page(self, keys: Sequence[str]) -> None:
        self.around(Request("delete", keys[0]), lambda _: self.inner.delete(keys))

    def close(self) -> None:
        self.inner.close()


class WrappedUpload:
    """A multipart upload of a :class:`WrappedStore`."""

    def __init__(self, store: WrappedStore, key: str, inner: MultipartUpload) -> None:
        self._store = store
        self._key = key
        self._inner = inner

    def upload_part(self, number: int, body: bytearray) -> None:
        def send(request: Request) -> None:
            sent = request.body if isinstance(request.body, bytearray) else body
            self._inner.upload_part(request.number, sent)

        self._store.around(Request("upload_part", self._key, body=body, number=number), send)

    def complete(self) -> str:
        return self._store.around(Request("complete", self._key), lambda _: self._inner.complete())

    def abort(self) -> None:
        self._store.around(Request("abort", self._key), lambda _: self._inner.abort())


@dataclass(frozen=True)
class WrappedAbandonedUpload:
    """An upload that a :class:`WrappedStore` lists."""

    store: WrappedStore
    inner: AbandonedUpload

    @property
    def key(self) -> str:
        return self.inner.key

    @property
    def started_at(self) -> float:
        return self.inner.started_at

    def abort(self) -> None:
        self.store.around(Request("abort", self.key), lambda _: self.inner.abort())
