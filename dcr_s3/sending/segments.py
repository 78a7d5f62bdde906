"""Writes encoded blocks, in order, to segments, and uploads them while more are coming."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import Any

from dcr_s3.format.digest import sha256_hex
from dcr_s3.format.keys import segment_key
from dcr_s3.format.manifest import SegmentEntry
from dcr_s3.format.segment import BlockEntry, SegmentHeader, finish
from dcr_s3.store.base import MultipartUpload, Store
from dcr_s3.timeline import Timeline
from dcr_s3.workers import abandon

log = logging.getLogger(__name__)

PART_BYTES = 8 << 20


@dataclass(frozen=True)
class SegmentSizes:
    """When a segment is closed: at ``most_bytes``, or from ``least_bytes`` on after ``dense_bytes`` of input, so that
    even a small delta travels while the rest of it is still being found. One of twice ``part_bytes`` or more is sent in
    parts of this size, the last one larger."""

    most_bytes: int = 32 << 20
    least_bytes: int = 256 << 10
    dense_bytes: int = 1 << 30
    part_bytes: int = PART_BYTES


class _OpenSegment:
    """One segment being filled: bytes not yet sent, digests, index entries."""

    def __init__(self, header: SegmentHeader, key: str) -> None:
        self.header = header
        self.key = key
        self.buffer = bytearray()
        self.sha256 = hashlib.sha256()
        self.size_bytes = 0
        self.dense_bytes = 0
        self.blocks: list[BlockEntry] = []
        self.upload: MultipartUpload | None = None
        self.parts: list[Future[None]] = []
        self.write(header.to_bytes())

    def write(self, data: bytes) -> None:
        self.buffer += data
        self.sha256.update(data)
        self.size_bytes += len(data)


def version_place(header: SegmentHeader) -> str:
    """Key of a version's segment."""
    return segment_key(header.version, header.attempt, header.owner, header.seq)


class SegmentWriter:
    """One owner's segments of one attempt. Not thread-safe: the caller appends in order, one block at a time.

    At most ``in_flight`` parts wait for the network; then :meth:`append` blocks, and with it the encoders. ``place``
    gives a segment's key.
    """

    def __init__(
        self,
        store: Store,
        header: SegmentHeader,
        uploaders: Executor,
        sizes: SegmentSizes,
        timeline: Timeline,
        *,
        in_flight: int = 8,
        place: Callable[[SegmentHeader], str] = version_place,
    ) -> None:
        self._store = store
        self._next = header
        self._uploaders = uploaders
        self._sizes = sizes
        self._timeline = timeline
        self._place = place
        self._slots = threading.Semaphore(in_flight)
        self._open: _OpenSegment | None = None
        self._closing: list[Future[SegmentEntry]] = []
        self._begun: list[_OpenSegment] = []

    def append(self, entry: BlockEntry, payload: bytes) -> None:
        """Adds a block; ``entry.offset`` is filled in here."""
        segment = self._open
        if segment is None:
            segment = self._open = _OpenSegment(self._next, self._place(self._next))
            self._begun.append(segment)
            self._next = replace(self._next, seq=self._next.seq + 1)
        segment.blocks.append(replace(entry, offset=segment.size_bytes))
        segment.write(payload)
        segment.dense_bytes += entry.dense_bytes
        while len(segment.buffer) >= 2 * self._sizes.part_bytes:
            self._send_part(segment, self._sizes.part_bytes)
        enough = segment.size_bytes >= self._sizes.least_bytes and segment.dense_bytes >= self._sizes.dense_bytes
        if segment.size_bytes >= self._sizes.most_bytes or enough:
            self._close(segment)

    def passed(self, dense_bytes: int) -> None:
        """Counts input without changes, which takes no block."""
        if self._open is not None:
            self._open.dense_bytes += dense_bytes

    def finish(self) -> list[SegmentEntry]:
        """Closes the last segment and waits until all are in the bucket."""
        if self._open is not None:
            self._close(self._open)
        return [future.result() for future in self._closing]

    def abort(self) -> None:
        """Drops every upload and deletes every object of this attempt; what cannot be deleted is left and logged."""
        abandon(self._closing)
        for segment in self._begun:
            abandon(segment.parts)
            if segment.upload is not None:
                self._quietly(segment.upload.abort, segment.key)
        if self._begun:
            self._quietly(lambda: self._store.delete([s.key for s in self._begun]), self._begun[0].key)

    def _send_part(self, segment: _OpenSegment, size: int) -> None:
        if segment.upload is None:
            segment.upload = self._store.open_multipart(segment.key)
        body = bytearray(memoryview(segment.buffer)[:size])
        del segment.buffer[:size]
        segment.parts.append(self._submit(segment.upload.upload_part, len(segment.parts) + 1, body))

    def _close(self, segment: _OpenSegment) -> None:
        self._open = None
        index, trailer = finish(segment.blocks, segment.size_bytes)
        segment.write(index)
        segment.write(trailer)
        if segment.upload is not None:
            self._send_part(segment, len(segment.buffer))
        entry = SegmentEntry(
            owner=segment.header.owner,
            seq=segment.header.seq,
            size_bytes=segment.size_bytes,
            sha256=segment.sha256.hexdigest(),
            index_bytes=len(index),
            index_sha256=sha256_hex(index),
        )
        self._closing.append(self._submit(self._complete, segment, entry))

    def _complete(self, segment: _OpenSegment, entry: SegmentEntry) -> SegmentEntry:
        if segment.upload is None:
            self._store.put(segment.key, segment.buffer)
        else:
            for part in segment.parts:
                part.result()
            segment.upload.complete()
        segment.buffer = bytearray()
        return entry

    def _submit(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        def run() -> Any:
            try:
                with self._timeline.stage("upload"):
                    return fn(*args)
            finally:
                self._slots.release()

        self._slots.acquire()
        try:
            return self._uploaders.submit(run)
        except BaseException:
            self._slots.release()
            raise

    @staticmethod
    def _quietly(action: Callable[[], None], key: str) -> None:
        try:
            action()
        except Exception as error:
            log.warning("%s: could not be cleaned up after a failed attempt (%s); the lifecycle rule will", key, error)
