from __future__ import annotations

import pytest

from dcr_s3.errors import BadInput
from dcr_s3.store import open_store
from dcr_s3.store.address import MemoryAddress, S3Address, parse_address
from dcr_s3.store.memory import MemoryStore


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("s3://bucket", S3Address("bucket")),
        ("s3://bucket/", S3Address("bucket")),
        ("s3://bucket/run", S3Address("bucket", "run")),
        ("s3://bucket/team/run 1/", S3Address("bucket", "team/run 1")),
        ("s3://bucket/100%25", S3Address("bucket", "100%25")),
        (
            "s3://bucket/run?endpoint_url=http://127.0.0.1:9000&region=eu-west-1&profile=lab",
            S3Address("bucket", "run", endpoint_url="http://127.0.0.1:9000", region="eu-west-1", profile="lab"),
        ),
        (
            "s3://bucket/run?addressing=virtual&checksum=off",
            S3Address("bucket", "run", None, None, None, "virtual", "off"),
        ),
        ("memory://name", MemoryAddress("name")),
        ("memory://name/run/1", MemoryAddress("name", "run/1")),
    ],
)
def test_addresses(url: str, address: S3Address | MemoryAddress) -> None:
    assert parse_address(url) == address
    assert parse_address(url).url == url.partition("?")[0].rstrip("/")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "not the URL of a store"),
        ("/some/dir", "not the URL of a store: write it like s3://bucket/run"),
        ("gs://bucket/run", "gs://bucket/run is not the URL of a store"),
        ("S4://bucket", "not the URL of a store"),
        ("s3://", "names no bucket"),
        ("s3:///run", "names no bucket"),
        ("memory://", "names no bucket"),
        ("s3://[bucket/run", "not a store URL"),
        ("s3://bucket/a//b", "empty"),
        ("s3://bucket/../b", r"'\.\.'"),
        ("s3://bucket/run#1", "#"),
        ("s3://bucket/run?color=red", "unknown parameter color in the URL; known are endpoint_url, region"),
        ("s3://bucket/run?region=", "region in the URL is empty"),
        ("s3://bucket/run?addressing=paths", "must be one of auto, path, virtual, not paths"),
        ("s3://bucket/run?endpoint_url=127.0.0.1:9000", "endpoint_url must be like https://"),
        ("memory://name?region=x", "takes no parameters"),
    ],
)
def test_malformed(url: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        parse_address(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:hunter2@bucket/run",
        "s3://bucket/run?endpoint_url=http://me:hunter2@127.0.0.1:9000",
        "s3://bucket/run?secret_key=hunter2",
        "s3://bucket/run?aws_session_token=hunter2",
    ],
)
def test_credentials_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(BadInput, match="credentials do not belong in a URL") as caught:
        parse_address(url)
    assert "hunter2" not in str(caught.value)


def test_secrets_do_not_show() -> None:
    address = S3Address("bucket", access_key="AKIA", secret_key="hunter2")
    assert "hunter2" not in repr(address)
    assert "AKIA" not in repr(address)


def test_environment_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCR_S3_ADDRESSING", "virtual")
    monkeypatch.setenv("DCR_S3_CHECKSUM", "off")
    assert parse_address("s3://bucket") == S3Address("bucket", addressing="virtual", checksum="off")
    assert parse_address("s3://bucket?addressing=path") == S3Address("bucket", addressing="path", checksum="off")
    monkeypatch.setenv("DCR_S3_ADDRESSING", "sideways")
    with pytest.raises(BadInput, match="DCR_S3_ADDRESSING"):
        parse_address("s3://bucket")


def test_memory_stores_are_shared_by_name() -> None:
    whole, part = open_store("memory://shared-by-name"), open_store("memory://shared-by-name/run")
    part.put("k", b"x")
    assert [entry.key for entry in whole.list("")] == ["run/k"]
    assert [entry.key for entry in part.list("")] == ["k"]
    assert list(open_store("memory://another-name").list("")) == []
    assert list(MemoryStore().list("")) == []
    assert part.url == "memory://shared-by-name/run"
