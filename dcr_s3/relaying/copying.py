"""Copies one object to several stores, reading it once and proving it before it becomes visible."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from hashlib import sha256

from dcr_s3.errors import CorruptObject, NotFound
from dcr_s3.store.base import Store

PART_BYTES = 8 << 20
_MOST_PARTS = 9000


def holds(store: Store, key: str, size_bytes: int) -> bool:
    """Whether an object of this size is there; keys are written once, so it is the right one."""
    try:
        return store.head(key).size_bytes == size_bytes
    except NotFound:
        return False


def copy_object(source: Store, targets: Sequence[Store], key: str, size_bytes: int, digest: str) -> None:
    """Copies ``key`` from ``source`` to all ``targets`` in parts.

    Raises ``CorruptObject`` if its bytes do not have the SHA-256 ``digest``, with nothing visible at any target, and
    ``NotFound`` if the source lacks it.
    """
    if not targets:
        return
    part_bytes = max(PART_BYTES, -(-size_bytes // _MOST_PARTS))
    found = sha256()
    if size_bytes <= part_bytes:
        body = _read(source, key, 0, size_bytes)
        found.update(body)
        _require(source, key, found.hexdigest(), digest)
        for target in targets:
            target.put(key, body)
        return
    with ExitStack() as stack:
        uploads = []
        for target in targets:
            uploads.append(target.open_multipart(key))
            stack.callback(uploads[-1].abort)
        for number, start in enumerate(range(0, size_bytes, part_bytes), 1):
            body = _read(source, key, start, min(part_bytes, size_bytes - start))
            found.update(body)
            for upload in uploads:
                upload.upload_part(number, body)
        _require(source, key, found.hexdigest(), digest)
        for upload in uploads:
            upload.complete()


def _read(source: Store, key: str, start: int, size_bytes: int) -> bytearray:
    body = bytearray(size_bytes)
    source.read_into(key, start, memoryview(body))
    return body


def _require(source: Store, key: str, found: str, digest: str) -> None:
    if found != digest:
        raise CorruptObject(f"{source.url}/{key}: its bytes do not have the digest that was committed; not copied")
