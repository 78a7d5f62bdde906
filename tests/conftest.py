"""Stores and servers for tests, and an environment without anybody's AWS settings."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcr_s3.store.memory import MemoryStore
from dcr_s3.store.s3 import S3Store
from dcr_s3.testing.servers import EmbeddedS3, LocalServer, SeaweedServer

BUCKET = "tests"
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _no_aws_settings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test may find this machine's credentials, endpoint or region."""
    for name in [*os.environ]:
        if name.startswith(("AWS_", "DCR_")):
            monkeypatch.delenv(name)
    nowhere = str(Path(tmp_path_factory.getbasetemp()) / "absent")
    monkeypatch.setenv("AWS_CONFIG_FILE", nowhere)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", nowhere)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def memory_store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture(scope="session")
def moto_server() -> Iterator[EmbeddedS3]:
    with EmbeddedS3() as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture(scope="session")
def seaweed_server() -> Iterator[SeaweedServer]:
    with SeaweedServer() as server:
        server.create_bucket(BUCKET)
        yield server


def fresh_prefix() -> str:
    """A place in the bucket that no other test uses."""
    return f"prefix-{next(_numbers)}"


def _store_at(server: LocalServer) -> Iterator[S3Store]:
    store = S3Store(server.address(BUCKET, fresh_prefix()))
    yield store
    store.close()


@pytest.fixture
def moto_store(moto_server: EmbeddedS3) -> Iterator[S3Store]:
    yield from _store_at(moto_server)


@pytest.fixture
def seaweed_store(seaweed_server: SeaweedServer) -> Iterator[S3Store]:
    yield from _store_at(seaweed_server)


def _url_at(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{fresh_prefix()}"


@pytest.fixture
def moto_url(moto_server: EmbeddedS3, monkeypatch: pytest.MonkeyPatch) -> str:
    """An unused address, for which the environment is set up."""
    return _url_at(moto_server, monkeypatch)


@pytest.fixture
def seaweed_url(seaweed_server: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """An unused address, for which the environment is set up."""
    return _url_at(seaweed_server, monkeypatch)
