"""A bucket in this process's memory: the semantics every other store is held to."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from dcr_s3.errors import BadInput, CorruptObject, NotFound, PreconditionFailed
from dcr_s3.store.base import MIN_PART_BYTES, Object, ObjectInfo
from dcr_s3.store.multipart import ordered_parts
from dcr_s3.world import world


@dataclass(frozen=True)
class _Stored:
    body: bytes
    etag: str
    modified_at: float


@dataclass
class MemoryBucket:
    """What several :class:`MemoryStore` may share. Every change happens under ``lock``."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    objects: dict[str, _Stored] = field(default_factory=dict)
    uploads: dict[int, MemoryUpload] = field(default_factory=dict)
    upload_ids: Iterator[int] = field(default_factory=itertools.count)
    min_part_bytes: int = MIN_PART_BYTES


_buckets: dict[str, MemoryBucket] = {}
_buckets_lock = threading.Lock()


def shared_bucket(name: str) -> MemoryBucket:
    """The bucket all ``memory://name`` addresses of this process mean; made on first use."""
    with _buckets_lock:
        return _buckets.setdefault(name, MemoryBucket())


def _etag(body: bytes | bytearray) -> str:
    return f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'


class MemoryStore:
    """A :class:`~dcr_s3.store.base.Store` over a :class:`MemoryBucket`, by default one of its own."""

    def __init__(self, bucket: MemoryBucket | None = None, *, prefix: str = "", url: str = "memory:") -> None:
        self._bucket = MemoryBucket() if bucket is None else bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._url = url

    @property
    def url(self) -> str:
        return self._url

    def _find(self, key: str) -> _Stored:
        with self._bucket.lock:
            stored = self._bucket.objects.get(self._prefix + key)
        if stored is None:
            raise NotFound(f"no object {self.url}/{key}")
        return stored

    def get(self, key: str, *, limit_bytes: int, if_none_match: str | None = None) -> Object | None:
        stored = self._find(key)
        if stored.etag == if_none_match:
            return None
        if len(stored.body) > limit_bytes:
            raise CorruptObject(f"{self.url}/{key} has {len(stored.body)} bytes, at most {limit_bytes} were expected")
        return Object(stored.body, stored.etag)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        body = self._find(key).body
        end = start + len(buffer)
        if end > len(body):
            raise CorruptObject(f"{self.url}/{key} ends at byte {len(body)}, before byte {end} that was asked for")
        buffer[:] = body[start:end]

    def head(self, key: str) -> ObjectInfo:
        stored = self._find(key)
        return ObjectInfo(key, len(stored.body), stored.etag, stored.modified_at)

    def put(self, key: str, body: bytes | bytearray, *, if_absent: bool = False, if_match: str | None = None) -> str:
        fresh = _Stored(bytes(body), _etag(body), world().time())
        with self._bucket.lock:
            present = self._bucket.objects.get(self._prefix + key)
            if if_absent and present is not None:
                raise PreconditionFailed(f"{self.url}/{key} exists")
            if if_match is not None and (present is None or present.etag != if_match):
                raise PreconditionFailed(f"{self.url}/{key} is not the one with ETag {if_match}")
            self._bucket.objects[self._prefix + key] = fresh
        return fresh.etag

    def open_multipart(self, key: str) -> MemoryUpload:
        upload = MemoryUpload(self._bucket, self._prefix, key)
        with self._bucket.lock:
            self._bucket.uploads[upload.number] = upload
        return upload

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        with self._bucket.lock:
            found = [(k, s) for k, s in self._bucket.objects.items() if k.startswith(self._prefix + prefix)]
        for full_key, stored in sorted(found, key=lambda pair: pair[0].encode()):
            key = full_key[len(self._prefix) :]
            if start_after is None or key.encode() > start_after.encode():
                yield ObjectInfo(key, len(stored.body), stored.etag, stored.modified_at)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with self._bucket.lock:
                self._bucket.objects.pop(self._prefix + key, None)

    def list_uploads(self, prefix: str) -> Iterator[MemoryAbandonedUpload]:
        with self._bucket.lock:
            found = [u for u in self._bucket.uploads.values() if u.full_key.startswith(self._prefix + prefix)]
        for upload in sorted(found, key=lambda upload: upload.full_key.encode()):
            yield MemoryAbandonedUpload(upload.full_key[len(self._prefix) :], upload.started_at, upload)

    def close(self) -> None:
        """Nothing to give back."""


class MemoryUpload:
    """One multipart upload into a :class:`MemoryBucket`."""

    def __init__(self, bucket: MemoryBucket, prefix: str, key: str) -> None:
        self._bucket = bucket
        self._key = key
        self.full_key = prefix + key
        self.started_at = world().time()
        self.number = next(bucket.upload_ids)
        self._parts: dict[int, bytes] = {}

    def _require_open(self) -> None:
        if self.number not in self._bucket.uploads:
            raise BadInput(f"the upload of {self._key} was already completed or aborted")

    def upload_part(self, number: int, body: bytearray) -> None:
        with self._bucket.lock:
            self._require_open()
            self._parts[number] = bytes(body)

    def complete(self) -> str:
        with self._bucket.lock:
            self._require_open()
            parts = ordered_parts(self._key, self._parts)
            least = self._bucket.min_part_bytes
            if any(len(part) < least for part in parts[:-1]):
                raise BadInput(f"every part of {self._key} but the last needs {least} bytes or more")
            body = b"".join(parts)
            etag = f'{_etag(body)[:-1]}-{len(parts)}"'
            self._bucket.objects[self.full_key] = _Stored(body, etag, world().time())
            del self._bucket.uploads[self.number]
        return etag

    def abort(self) -> None:
        with self._bucket.lock:
            self._bucket.uploads.pop(self.number, None)


@dataclass(frozen=True)
class MemoryAbandonedUpload:
    """An upload as :meth:`MemoryStore.list_uploads` reports it."""

    key: str
    started_at: float
    upload: MemoryUpload

    def abort(self) -> None:
        self.upload.abort()
