"""A prefix of an S3 bucket, on AWS or any server that speaks the same protocol."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import crc32c
from botocore.exceptions import ClientError

from dcr_s3.errors import BadInput, ConfigError, CorruptObject, NotFound
from dcr_s3.store.address import S3Address
from dcr_s3.store.base import Object, ObjectInfo, Poller
from dcr_s3.store.multipart import ordered_parts
from dcr_s3.store.s3_client import connect
from dcr_s3.store.s3_errors import DamagedInTransit, UploadGone, again_if_damaged, translated

if TYPE_CHECKING:
    from botocore.response import StreamingBody
    from mypy_boto3_s3.client import S3Client

_DELETE_BATCH = 1000


def read_arguments(full_key: str, if_none_match: str | None) -> dict[str, Any]:
    """Arguments of a conditional ``get_object``, beyond the bucket."""
    return {"Key": full_key} | ({"IfNoneMatch": if_none_match} if if_none_match is not None else {})


def is_not_modified(error: ClientError) -> bool:
    """Whether an error reply is the 304 of a conditional read."""
    return error.response["ResponseMetadata"]["HTTPStatusCode"] == 304


def require_size(url: str, key: str, size_bytes: int, limit_bytes: int) -> None:
    """Raises CorruptObject for an object that is larger than it may be."""
    if size_bytes > limit_bytes:
        raise CorruptObject(f"{url}/{key} has {size_bytes} bytes, at most {limit_bytes} were expected")


class S3Store:
    """A :class:`~dcr_s3.store.base.Store` over boto3. Requests that got no answer, a 5xx or a damaged body are repeated
    a few times before an error is raised.

    A conditional ``put`` whose first try was applied but whose reply was lost is repeated as well, and then answered by
    ``PreconditionFailed`` to its own writer: read the object back to tell.
    """

    def __init__(self, address: S3Address) -> None:
        """Raises ConfigError for settings that cannot work. Sends nothing yet."""
        self._client, self._addressing = connect(address)
        self._address = address
        self._prefix = f"{address.prefix}/" if address.prefix else ""
        self._endpoint = self._client.meta.endpoint_url

    @property
    def url(self) -> str:
        return self._address.url

    @property
    def address(self) -> S3Address:
        """Where this store is."""
        return self._address

    @property
    def client(self) -> S3Client:
        """The boto3 client, for its event hooks."""
        return self._client

    def below(self, prefix: str) -> S3Store:
        """A prefix of this one, over the same client, which only this store closes."""
        other = copy(self)
        other._prefix = f"{self._prefix}{prefix}/"
        other._address = replace(self._address, prefix=other._prefix.rstrip("/"))
        return other

    def open_poller(self) -> Poller:
        """See :func:`dcr_s3.store.open_poller`."""
        from dcr_s3.store.s3_poller import S3Poller

        return S3Poller(self._address, self._addressing)

    def _request(self, verb: str, key: str, *, conditional: bool = False) -> AbstractContextManager[None]:
        return translated(f"{verb} {self.url}/{key}", self._endpoint, conditional=conditional)

    @again_if_damaged
    def get(self, key: str, *, limit_bytes: int, if_none_match: str | None = None) -> Object | None:
        with self._request("read", key):
            try:
                arguments = read_arguments(self._prefix + key, if_none_match)
                reply = self._client.get_object(Bucket=self._address.bucket, **arguments)
            except ClientError as error:
                if is_not_modified(error):
                    return None
                raise
            with closing(reply["Body"]) as body:
                require_size(self.url, key, reply["ContentLength"], limit_bytes)
                buffer = bytearray(reply["ContentLength"])
                self._fill(body, memoryview(buffer), key)
            return Object(bytes(buffer), reply["ETag"])

    @again_if_damaged
    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        if not len(buffer):
            return
        wanted = f"bytes={start}-{start + len(buffer) - 1}"
        with self._request("read", key):
            reply = self._client.get_object(Bucket=self._address.bucket, Key=self._prefix + key, Range=wanted)
            with closing(reply["Body"]) as body:
                if reply["ResponseMetadata"]["HTTPStatusCode"] != 206:
                    raise ConfigError(f"{self._endpoint} ignores ranges: {self.url}/{key} cannot be read in pieces")
                if reply["ContentLength"] != len(buffer):
                    end = start + reply["ContentLength"]
                    raise CorruptObject(
                        f"{self.url}/{key} ends at byte {end}, before byte {start + len(buffer)} that was asked for"
                    )
                self._fill(body, buffer, key)

    def _fill(self, body: StreamingBody, buffer: memoryview, key: str) -> None:
        filled = 0
        while filled < len(buffer):
            view: Any = buffer[filled:]  # the stubs ask for a file
            count = body.readinto(view)
            if not count:
                raise DamagedInTransit(
                    f"could not read {self.url}/{key}: the reply from {self._endpoint} ended early several times; "
                    "try again later"
                )
            filled += count

    @again_if_damaged
    def head(self, key: str) -> ObjectInfo:
        with self._request("look at", key):
            reply = self._client.head_object(Bucket=self._address.bucket, Key=self._prefix + key)
        return ObjectInfo(key, reply["ContentLength"], reply["ETag"], reply["LastModified"].timestamp())

    @again_if_damaged
    def put(self, key: str, body: bytes | bytearray, *, if_absent: bool = False, if_match: str | None = None) -> str:
        if if_absent and if_match is not None:
            raise BadInput("a put has either if_absent or if_match")
        # A bytes body would make botocore ask "Expect: 100-continue" first, a second round trip.
        sent: Any = bytearray(body)
        condition: dict[str, Any] = {"IfNoneMatch": "*"} if if_absent else {}
        condition |= {"IfMatch": if_match} if if_match is not None else {}
        with self._request("write", key, conditional=bool(condition)):
            reply = self._client.put_object(
                Bucket=self._address.bucket, Key=self._prefix + key, Body=sent, **condition, **self._checksum(sent)
            )
        return reply["ETag"]

    def _checksum(self, body: bytearray) -> dict[str, Any]:
        """The header by which the store notices a body that was damaged on its way."""
        if self._address.checksum == "off":
            return {}
        return {"ChecksumCRC32C": base64.b64encode(crc32c.crc32c(body).to_bytes(4, "big")).decode()}

    @again_if_damaged
    def open_multipart(self, key: str) -> S3Upload:
        algorithm: dict[str, Any] = {"ChecksumAlgorithm": "CRC32C"} if self._address.checksum == "crc32c" else {}
        with self._request("start the upload of", key):
            reply = self._client.create_multipart_upload(
                Bucket=self._address.bucket, Key=self._prefix + key, **algorithm
            )
        return S3Upload(self, key, reply["UploadId"])

    @again_if_damaged
    def send_part(self, key: str, upload_id: str, number: int, body: bytearray) -> dict[str, Any]:
        """Uploads one part and returns what ``complete_upload`` wants to know of it."""
        sent: Any = body
        checksum = self._checksum(body)
        with self._request(f"upload part {number} of", key):
            reply = self._client.upload_part(
                Bucket=self._address.bucket,
                Key=self._prefix + key,
                UploadId=upload_id,
                PartNumber=number,
                Body=sent,
                **checksum,
            )
        return {"PartNumber": number, "ETag": reply["ETag"], **checksum}

    @again_if_damaged
    def complete_upload(self, key: str, upload_id: str, parts: list[Any]) -> str:
        """Makes an upload visible and returns its ETag."""
        with self._request("complete the upload of", key):
            reply = self._client.complete_multipart_upload(
                Bucket=self._address.bucket,
                Key=self._prefix + key,
                UploadId=upload_id,
                MultipartUpload={"Parts": parts},
            )
        return reply["ETag"]

    @again_if_damaged
    def abort_upload(self, key: str, upload_id: str) -> None:
        """Drops an upload; one that is gone is no error."""
        try:
            with self._request("abort the upload of", key):
                self._client.abort_multipart_upload(
                    Bucket=self._address.bucket, Key=self._prefix + key, UploadId=upload_id
                )
        except UploadGone:
            pass

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        after = {"StartAfter": self._prefix + start_after} if start_after is not None else {}
        for page in self._pages("list_objects_v2", prefix, after):
            for entry in page.get("Contents", ()):
                key = entry["Key"][len(self._prefix) :]
                yield ObjectInfo(key, entry["Size"], entry["ETag"], entry["LastModified"].timestamp())

    def _pages(self, operation: Any, prefix: str, arguments: dict[str, str]) -> Iterator[Any]:
        pages = iter(
            self._client.get_paginator(operation).paginate(
                Bucket=self._address.bucket, Prefix=self._prefix + prefix, **arguments
            )
        )
        while True:
            with self._request("list", prefix + "*"):
                page: Any = next(pages, None)
            if page is None:
                return
            yield page

    @again_if_damaged
    def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        for first in range(0, len(wanted), _DELETE_BATCH):
            batch = wanted[first : first + _DELETE_BATCH]
            what = batch[0] if len(batch) == 1 else f"{batch[0]} and {len(batch) - 1} more"
            with self._request("delete", what):
                reply = self._client.delete_objects(
                    Bucket=self._address.bucket,
                    Delete={"Objects": [{"Key": self._prefix + key} for key in batch], "Quiet": True},
                )
                for refused in reply.get("Errors", ()):
                    status = 403 if refused.get("Code") == "AccessDenied" else 500
                    answer: Any = {"Error": refused, "ResponseMetadata": {"HTTPStatusCode": status}}
                    raise ClientError(answer, "DeleteObjects")

    def list_uploads(self, prefix: str) -> Iterator[S3AbandonedUpload]:
        for page in self._pages("list_multipart_uploads", prefix, {}):
            for entry in page.get("Uploads", ()):
                key = entry["Key"][len(self._prefix) :]
                yield S3AbandonedUpload(self, key, entry["UploadId"], entry["Initiated"].timestamp())

    def close(self) -> None:
        self._client.close()


class S3Upload:
    """One multipart upload. Parts carry their checksum, so that the store refuses damaged ones."""

    def __init__(self, store: S3Store, key: str, upload_id: str) -> None:
        self._store = store
        self._key = key
        self._upload_id = upload_id
        self._parts: dict[int, dict[str, Any]] = {}
        self._sizes_bytes: dict[int, int] = {}
        self._ended = False

    def _require_open(self) -> None:
        if self._ended:
            raise BadInput(f"the upload of {self._key} was already completed or aborted")

    def upload_part(self, number: int, body: bytearray) -> None:
        self._require_open()
        self._parts[number] = self._store.send_part(self._key, self._upload_id, number, body)
        self._sizes_bytes[number] = len(body)

    def complete(self) -> str:
        self._require_open()
        parts = ordered_parts(self._key, self._parts)
        try:
            etag = self._store.complete_upload(self._key, self._upload_id, parts)
        except UploadGone:
            etag = self._settle()
        self._ended = True
        return etag

    def _settle(self) -> str:
        """An upload is gone also after it was completed and the reply lost: keys are written once, so an object of
        the right size is ours."""
        try:
            found = self._store.head(self._key)
        except NotFound:
            found = None
        if found is None or found.size_bytes != sum(self._sizes_bytes.values()):
            raise UploadGone(
                f"could not complete the upload of {self._store.url}/{self._key}: the store no longer knows it, "
                "aborted or expired; start it again"
            )
        return found.etag

    def abort(self) -> None:
        if not self._ended:
            self._store.abort_upload(self._key, self._upload_id)
            self._ended = True


@dataclass(frozen=True)
class S3AbandonedUpload:
    """An upload as :meth:`S3Store.list_uploads` reports it."""

    store: S3Store
    key: str
    upload_id: str
    started_at: float

    def abort(self) -> None:
        self.store.abort_upload(self.key, self.upload_id)
