"""The doctor on real servers: what it says, what it leaves."""

from __future__ import annotations

import pytest

from dcr_s3.doctor import Diagnosis, examine
from dcr_s3.errors import Forbidden
from dcr_s3.store import open_store
from dcr_s3.store.memory import MemoryStore


def failed(diagnosis: Diagnosis) -> dict[str, str]:
    return {check.name: check.severity for check in diagnosis.checks if not check.ok}


def test_a_real_server_is_usable_and_left_clean(seaweed_url: str) -> None:
    open_store(seaweed_url).put("other", b"mine")
    diagnosis = examine(seaweed_url)
    assert diagnosis.usable
    assert failed(diagnosis) == {"list order across slashes": "harmless"}
    assert diagnosis.run_id is None
    assert diagnosis.latency_s
    assert diagnosis.upload_bytes_per_s
    assert diagnosis.download_bytes_per_s
    store = open_store(seaweed_url)
    assert [o.key for o in store.list("")] == ["other"]
    assert list(store.list_uploads("")) == []


def test_a_store_that_ignores_conditions_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = MemoryStore.put

    def put(self: MemoryStore, key: str, body: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        return kept(self, key, body)

    monkeypatch.setattr(MemoryStore, "put", put)
    diagnosis = examine("memory://doctor-careless/run")
    assert not diagnosis.usable
    found = failed(diagnosis)
    assert found["create only where nothing is"] == found["racing creates have one winner"] == "blocks"
    assert found["compare and set"] == "limits"
    told = next(c for c in diagnosis.checks if c.name == "create only where nothing is")
    assert "two senders" in told.meaning


def test_credentials_that_only_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def put(self: MemoryStore, key: str, body: bytes, **_: object) -> str:
        raise Forbidden(f"{key}: no right to write")

    monkeypatch.setattr(MemoryStore, "put", put)
    diagnosis = examine("memory://doctor-reader/run")
    assert diagnosis.usable
    assert [(c.name, c.ok) for c in diagnosis.checks] == [("run", True), ("may list", True), ("may write", False)]


def test_memory_store_for_comparison() -> None:
    diagnosis = examine("memory://doctor-test/run")
    assert failed(diagnosis) == {}
    assert list(open_store("memory://doctor-test").list("")) == []
