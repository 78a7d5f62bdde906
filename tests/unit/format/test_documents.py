"""JSON documents: round trip, version policy, refusal of what is malformed."""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dcr_s3.errors import CorruptObject, UnsupportedFormat
from dcr_s3.format.ack import Ack
from dcr_s3.format.manifest import Manifest, Parent
from dcr_s3.format.run import Run
from dcr_s3.format.snapshot import SnapshotFile

sys.path.insert(0, str(Path(__file__).parent))
from documents import RUN_ID, make_manifest, make_run


def sealed(fields: dict[str, Any]) -> bytes:
    fields.pop("~sha256", None)
    content = json.dumps(fields).encode()[:-1]
    return content + b',"~sha256":"' + sha256(content).hexdigest().encode() + b'"}\n'


def spoiled(document: Run | Manifest, **changes: Any) -> bytes:
    return sealed({**json.loads(document.to_bytes()), **changes})


def test_documents_survive_the_bucket() -> None:
    ack = Ack(run_id=RUN_ID, receiver="host-1", version=3, state="0" * 32, proved_at="now")
    assert Run.from_bytes(make_run().to_bytes(), where="x") == make_run()
    assert Manifest.from_bytes(make_manifest().to_bytes(), where="x") == make_manifest()
    assert Ack.from_bytes(ack.to_bytes(), where="x") == ack


def test_equal_documents_are_equal_bytes() -> None:
    assert make_manifest().to_bytes() == Manifest.from_bytes(make_manifest().to_bytes(), where="x").to_bytes()


def test_a_newer_minor_version_with_unknown_fields_is_read() -> None:
    body = spoiled(make_run(), format={"major": 1, "minor": 9}, colour="blue")
    assert Run.from_bytes(body, where="x").tensors == make_run().tensors


def test_another_major_version_is_refused_before_anything_else() -> None:
    body = spoiled(make_manifest(), format={"major": 2, "minor": 0}, version="not even a number", writer="dcr_s3 9")
    with pytest.raises(UnsupportedFormat, match=r"manifests/7.*format 2.*dcr_s3 9"):
        Manifest.from_bytes(body, where="manifests/7")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"magic":"dcr_s3/run"}', b'{"magic":"other"}', b"[" * 100_000],
)
def test_what_is_no_document_is_refused_by_name(body: bytes) -> None:
    with pytest.raises(CorruptObject, match="some/key"):
        Run.from_bytes(body, where="some/key")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("state", "0" * 32, "sum"),
        ("run_id", "../../etc", "run_id"),
        ("tensors", [], "tensors"),
        ("coding", "telepathy", "coding"),
    ],
)
def test_a_bad_run_field_is_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(CorruptObject, match=message):
        Run.from_bytes(spoiled(make_run(), **{field: value}), where="run.json")


def test_a_tensor_name_that_stands_twice_is_refused() -> None:
    run = json.loads(make_run().to_bytes())
    run["tensors"][0]["aliases"] = ["c"]
    with pytest.raises(CorruptObject, match="'c' stands twice"):
        Run.from_bytes(sealed(run), where="run.json")


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "F128"},
        {"shape": [-1, 2]},
        {"shape": [2**60]},
        {"shape": [3], "dtype": "F4"},
        {"name": ""},
        {"digest": "zz"},
    ],
)
def test_a_bad_tensor_is_refused(change: dict[str, Any]) -> None:
    run = json.loads(make_run().to_bytes())
    run["tensors"][0].update(change)
    with pytest.raises(CorruptObject):
        Run.from_bytes(sealed(run), where="run.json")


@pytest.mark.parametrize(
    "change",
    [
        {"parent": Parent(version=5, sha256="0" * 64)},
        {"kind": "fence"},
        {"segments": ()},
        {"attempt": "../x"},
        {"next_attempt": "000001-XYZ-0000"},
        {"version": 0},
    ],
)
def test_a_contradictory_manifest_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        make_manifest(**change)


def test_segments_must_be_in_order_and_once() -> None:
    entry = make_manifest().segments[0]
    with pytest.raises(ValidationError, match="order"):
        make_manifest(segments=(entry, entry))


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "x\n", "a" * 300])
def test_snapshot_files_stay_in_their_directory(name: str) -> None:
    with pytest.raises(ValidationError):
        SnapshotFile(name=name, size_bytes=1, sha256="0" * 64)


def test_any_flipped_bit_and_any_truncation_is_noticed() -> None:
    body = make_manifest().to_bytes()
    for at in range(len(body)):
        for bad in (body[:at], body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :], body[:at] + b" " + body[at:]):
            with pytest.raises((CorruptObject, UnsupportedFormat)):
                Manifest.from_bytes(bad, where="x")
