"""What the rest of the package may ask of a bucket.

Keys are relative to the store's prefix. Every method may raise ``StoreUnavailable``, ``Forbidden``, ``BucketMissing``
or ``ConfigError``; the two ordinary outcomes that callers must handle are ``NotFound`` and ``PreconditionFailed``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class ObjectInfo:
    """What a listing or a head request tells. ``modified_at`` is the store's clock, seconds since the epoch."""

    key: str
    size_bytes: int
    etag: str
    modified_at: float


@dataclass(frozen=True)
class Object:
    """One whole small object."""

    body: bytes
    etag: str


@runtime_checkable
class MultipartUpload(Protocol):
    """One object being written. Nothing is visible under the key before ``complete`` returns."""

    def upload_part(self, number: int, body: bytearray) -> None:
        """Sends part ``number`` (from 1). May be called from several threads at once. Every part but the last has at
        least ``MIN_PART_BYTES``. The same number again replaces the part."""

    def complete(self) -> str:
        """Makes the object visible and returns its ETag. Parts must be numbered 1..n without a gap."""

    def abort(self) -> None:
        """Drops everything sent. Safe to call twice and after a failure; never raises ``NotFound``."""


MIN_PART_BYTES = 5 * 1024 * 1024


@runtime_checkable
class Store(Protocol):
    """A bucket and a prefix in it. All methods may be called from several threads at once."""

    @property
    def url(self) -> str:
        """Address for people and messages, without credentials."""

    def get(self, key: str, *, limit_bytes: int, if_none_match: str | None = None) -> Object | None:
        """The whole object; None if its ETag equals ``if_none_match``. An object larger than ``limit_bytes`` raises
        ``CorruptObject`` before its body is read; a body shorter than announced raises ``StoreUnavailable``."""

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fills ``buffer`` with bytes ``start .. start + len(buffer)`` of the object, never less: an object that ends
        earlier raises ``CorruptObject``, a connection that breaks ``StoreUnavailable``."""

    def head(self, key: str) -> ObjectInfo:
        """Size and ETag."""

    def put(self, key: str, body: bytes | bytearray, *, if_absent: bool = False, if_match: str | None = None) -> str:
        """Writes the whole object and returns its ETag. With ``if_absent`` only where no object is; with ``if_match``
        only where the object's ETag is that. A condition that did not hold raises ``PreconditionFailed``, also where
        ``if_match`` names a missing object. ``StoreUnavailable`` leaves open whether the write happened."""

    def open_multipart(self, key: str) -> MultipartUpload:
        """Starts an upload."""

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Objects whose key starts with ``prefix``, in key order, beginning after ``start_after``."""

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes; missing keys are no error."""

    def list_uploads(self, prefix: str) -> Iterator[AbandonedUpload]:
        """Multipart uploads that were neither completed nor aborted."""

    def close(self) -> None:
        """Gives connections back."""


@runtime_checkable
class AbandonedUpload(Protocol):
    """An upload someone started; ``abort`` drops it."""

    @property
    def key(self) -> str: ...

    @property
    def started_at(self) -> float: ...

    def abort(self) -> None: ...


@runtime_checkable
class Poller(Protocol):
    """Conditional reads for a follower that waits on many things at once, on an event loop."""

    async def get(self, key: str, *, limit_bytes: int, if_none_match: str | None = None) -> Object | None:
        """As :meth:`Store.get`."""

    async def close(self) -> None:
        """Gives connections back."""
