"""Every reply and failure that botocore can report becomes an error that says what to do."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from botocore.awsrequest import AWSRequest, AWSResponse
from botocore.exceptions import ConnectionClosedError, EndpointConnectionError, ReadTimeoutError, SSLError

from dcr_s3.errors import (
    BadInput,
    BucketMissing,
    ConfigError,
    CorruptObject,
    DcrError,
    Forbidden,
    NotFound,
    PreconditionFailed,
    StoreUnavailable,
)
from dcr_s3.store import MultipartUpload, open_store
from dcr_s3.store.address import S3Address
from dcr_s3.store.s3 import S3Store

ADDRESS = S3Address(
    "bucket",
    "run",
    endpoint_url="http://store.invalid",
    region="us-east-1",
    access_key="AKIA-SECRET-ID",
    secret_key="hunter2",
)
Reply = AWSResponse | Exception


class _Raw(io.BytesIO):
    def stream(self) -> Iterator[bytes]:
        yield self.read()


def reply(status: int, code: str = "", headers: dict[str, str] | None = None, body: bytes = b"") -> AWSResponse:
    if code:
        body = f"<Error><Code>{code}</Code><Message>said the server</Message></Error>".encode()
    return AWSResponse("http://store.invalid", status, headers or {}, _Raw(body))


class Script:
    """Answers requests instead of a server: each reply once, the last one for ever."""

    def __init__(self, *replies: Callable[[], Reply]) -> None:
        self.requests: list[AWSRequest] = []
        self._replies = [*replies]

    def __call__(self, request: AWSRequest, **_: object) -> AWSResponse:
        self.requests.append(request)
        answer = (self._replies.pop(0) if len(self._replies) > 1 else self._replies[0])()
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)


def scripted(*replies: Callable[[], Reply], address: S3Address = ADDRESS) -> tuple[S3Store, Script]:
    store, script = S3Store(address), Script(*replies)
    store.client.meta.events.register("before-send.s3", script)
    return store, script


def get(store: S3Store) -> object:
    return store.get("k", limit_bytes=100)


def put(store: S3Store) -> object:
    return store.put("k", b"body")


def create(store: S3Store) -> object:
    return store.put("k", b"body", if_absent=True)


@pytest.mark.parametrize(
    ("status", "code", "act", "error", "message"),
    [
        (404, "NoSuchKey", get, NotFound, "s3://bucket/run/k: no such object"),
        (404, "NoSuchBucket", get, BucketMissing, "no such bucket at http://store.invalid; create it"),
        (404, "NoSuchBucket", create, BucketMissing, "no such bucket"),
        (404, "NoSuchKey", create, PreconditionFailed, "404 NoSuchKey"),
        (409, "ConditionalRequestConflict", create, PreconditionFailed, "409"),
        (412, "PreconditionFailed", create, PreconditionFailed, "412"),
        (409, "OperationAborted", put, StoreUnavailable, "409 OperationAborted"),
        (403, "AccessDenied", get, Forbidden, r"refused the credentials \(AccessDenied\); check their policy"),
        (403, "InvalidAccessKeyId", get, Forbidden, "check the profile or AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", get, Forbidden, "secret key"),
        (403, "RequestTimeTooSkewed", get, Forbidden, "clock"),
        (400, "ExpiredToken", get, Forbidden, "sign in again"),
        (401, "Unauthorized", get, Forbidden, "refused"),
        (400, "AuthorizationHeaderMalformed", put, ConfigError, "another region"),
        (416, "InvalidRange", get, CorruptObject, "ends before"),
        (400, "BadDigest", put, StoreUnavailable, "damaged"),
        (400, "RequestTimeout", put, StoreUnavailable, "try again later"),
        (429, "TooManyRequests", get, StoreUnavailable, "429"),
        (500, "InternalError", get, StoreUnavailable, "http://store.invalid answered 500 InternalError"),
        (503, "SlowDown", put, StoreUnavailable, "503 SlowDown"),
        (501, "NotImplemented", create, ConfigError, "does not implement"),
        (400, "EntityTooLarge", put, ConfigError, "400 EntityTooLarge said the server"),
    ],
)
def test_replies(status: int, code: str, act: Callable[[S3Store], object], error: type, message: str) -> None:
    store, _ = scripted(lambda: reply(status, code))
    with pytest.raises(error, match=message) as caught:
        act(store)
    assert type(caught.value) is error or isinstance(caught.value, StoreUnavailable)
    assert "s3://bucket/run/k" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "AKIA" not in str(caught.value)


@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        (
            EndpointConnectionError(endpoint_url="http://store.invalid/x"),
            StoreUnavailable,
            "no answer from http://store",
        ),
        (ReadTimeoutError(endpoint_url="http://store.invalid/x"), StoreUnavailable, "ReadTimeoutError"),
        (ConnectionClosedError(endpoint_url="http://store.invalid/x"), StoreUnavailable, "check the endpoint"),
        (SSLError(endpoint_url="http://store.invalid/x", error="bad certificate"), ConfigError, "AWS_CA_BUNDLE"),
    ],
)
def test_failures(failure: Exception, error: type, message: str) -> None:
    store, _ = scripted(lambda: failure)
    with pytest.raises(error, match=message):
        get(store)


def test_overload_is_waited_out() -> None:
    good = {"Content-Length": "4", "ETag": '"e"'}
    store, script = scripted(
        lambda: reply(503, "SlowDown"), lambda: reply(500), lambda: reply(200, headers=good, body=b"body")
    )
    assert get(store) is not None
    assert len(script.requests) == 3


def test_overload_is_not_waited_out_for_ever() -> None:
    store, script = scripted(lambda: reply(503, "SlowDown"))
    with pytest.raises(StoreUnavailable):
        get(store)
    assert len(script.requests) == 6


def test_body_that_ends_early_is_asked_for_again() -> None:
    headers = {"Content-Length": "8", "ETag": '"e"'}
    store, script = scripted(
        lambda: reply(200, headers=headers, body=b"half"), lambda: reply(200, headers=headers, body=b"complete")
    )
    found = store.get("k", limit_bytes=100)
    assert found is not None
    assert found.body == b"complete"
    assert len(script.requests) == 2
    store, script = scripted(lambda: reply(206, headers=headers, body=b"half"))
    with pytest.raises(StoreUnavailable, match="broke off several times"):
        store.read_into("k", 0, memoryview(bytearray(8)))
    assert len(script.requests) == 4


def test_damaged_upload_is_sent_again() -> None:
    store, script = scripted(lambda: reply(400, "BadDigest"), lambda: reply(200, headers={"ETag": '"e"'}))
    assert store.put("k", b"body", if_absent=True) == '"e"'
    assert len(script.requests) == 2


def test_store_without_ranges() -> None:
    store, _ = scripted(lambda: reply(200, headers={"Content-Length": "8", "ETag": '"e"'}, body=b"complete"))
    with pytest.raises(ConfigError, match="ignores ranges"):
        store.read_into("k", 2, memoryview(bytearray(3)))


def test_conditional_put_that_botocore_repeated() -> None:
    store, script = scripted(lambda: reply(500), lambda: reply(412, "PreconditionFailed"))
    with pytest.raises(PreconditionFailed):
        create(store)
    assert len(script.requests) == 2


def test_what_a_put_sends() -> None:
    store, script = scripted(lambda: reply(200, headers={"ETag": '"e"'}))
    store.put("k", b"123456789", if_absent=True)
    headers = script.requests[0].headers
    assert headers["x-amz-checksum-crc32c"] in ("4waSgw==", b"4waSgw==")  # the published check value of CRC-32C
    assert headers["X-Amz-Content-SHA256"] in ("UNSIGNED-PAYLOAD", b"UNSIGNED-PAYLOAD")
    assert headers["If-None-Match"] in ("*", b"*")
    assert "Expect" not in headers
    assert "Content-MD5" not in headers
    store, script = scripted(lambda: reply(200, headers={"ETag": '"e"'}), address=replace(ADDRESS, checksum="off"))
    store.put("k", b"123456789")
    assert not [name for name in script.requests[0].headers if "checksum" in name.lower()]


def test_both_conditions_at_once() -> None:
    store, script = scripted(lambda: reply(200))
    with pytest.raises(BadInput):
        store.put("k", b"", if_absent=True, if_match='"e"')
    assert script.requests == []


def test_delete_that_is_refused() -> None:
    body = b"<DeleteResult><Error><Key>run/a</Key><Code>AccessDenied</Code><Message>no</Message></Error></DeleteResult>"
    store, _ = scripted(lambda: reply(200, body=body))
    with pytest.raises(Forbidden, match="delete s3://bucket/run/a"):
        store.delete(["a"])


@pytest.mark.parametrize(
    ("address", "url"),
    [
        (ADDRESS, "http://store.invalid/bucket/run/k"),
        (replace(ADDRESS, addressing="virtual"), "http://bucket.store.invalid/run/k"),
        (replace(ADDRESS, endpoint_url=None, region="eu-west-1"), "https://bucket.s3.eu-west-1.amazonaws.com/run/k"),
        (
            replace(ADDRESS, endpoint_url=None, region="eu-west-1", addressing="path"),
            "https://s3.eu-west-1.amazonaws.com/bucket/run/k",
        ),
    ],
)
def test_addressing(address: S3Address, url: str) -> None:
    store, script = scripted(lambda: reply(404, "NoSuchKey"), address=address)
    with pytest.raises(NotFound):
        get(store)
    assert script.requests[0].url == url


def test_endpoint_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://store.invalid:9000")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    store = open_store("s3://bucket/run")
    assert isinstance(store, S3Store)
    script = Script(lambda: reply(404, "NoSuchKey"))
    store.client.meta.events.register("before-send.s3", script)
    with pytest.raises(NotFound):
        get(store)
    assert script.requests[0].url == "http://store.invalid:9000/bucket/run/k"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket/run?region=us-east-1", "no usable AWS credentials .*AWS_PROFILE.*AWS_ACCESS_KEY_ID"),
        ("s3://bucket/run?profile=nobody", "nobody"),
        ("s3://b/run", "b"),
    ],
)
def test_settings_that_cannot_work(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        open_store(url).get("k", limit_bytes=1)
    assert isinstance(caught.value, DcrError)


def uploaded(*replies: Callable[[], Reply]) -> tuple[MultipartUpload, Script]:
    """An upload with one part of four bytes, and what comes then."""
    created = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
    store, script = scripted(lambda: reply(200, body=created), lambda: reply(200, headers={"ETag": '"part"'}), *replies)
    upload = store.open_multipart("k")
    upload.upload_part(1, bytearray(b"body"))
    return upload, script


def looked_at(size_bytes: int) -> AWSResponse:
    headers = {"Content-Length": str(size_bytes), "ETag": '"whole"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
    return reply(200, headers=headers)


def test_completion_that_had_happened() -> None:
    upload, script = uploaded(lambda: reply(500), lambda: reply(404, "NoSuchUpload"), lambda: looked_at(4))
    assert upload.complete() == '"whole"'
    assert [request.method for request in script.requests] == ["POST", "PUT", "POST", "POST", "HEAD"]
    assert script.requests[2].body.count(b"<ChecksumCRC32C>") == 1


@pytest.mark.parametrize("found", [lambda: looked_at(5), lambda: reply(404)])
def test_completion_of_an_upload_that_expired(found: Callable[[], Reply]) -> None:
    upload, _ = uploaded(lambda: reply(404, "NoSuchUpload"), found)
    with pytest.raises(StoreUnavailable, match=r"s3://bucket/run/k: the store no longer knows it.*start it again"):
        upload.complete()
