"""Valid documents for tests to spoil."""

from __future__ import annotations

from typing import Any

from dcr_s3.format.digest import StateDigest
from dcr_s3.format.manifest import Manifest, Parent, SegmentEntry, Statistics
from dcr_s3.format.run import Run, TensorSpec

RUN_ID = "0123456789abcdef" * 2
ATTEMPT = "000001-0123456789ab-0000"


def make_run() -> Run:
    digests = [StateDigest(1, 2), StateDigest(3, 4)]
    return Run(
        run_id=RUN_ID,
        created_at="2026-01-01T00:00:00+00:00",
        state=(digests[0] + digests[1]).hex(),
        tensors=(
            TensorSpec(name="a", dtype="BF16", shape=(2, 3), digest=digests[0].hex()),
            TensorSpec(name="b", dtype="F32", shape=(5,), digest=digests[1].hex(), aliases=("c",)),
        ),
    )


def make_manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "run_id": RUN_ID,
        "version": 1,
        "kind": "delta",
        "parent": Parent(version=0, sha256="0" * 64),
        "epoch": 1,
        "write_id": "f" * 32,
        "attempt": ATTEMPT,
        "created_at": "2026-01-01T00:00:00+00:00",
        "state_before": "0" * 32,
        "state_after": "1" * 32,
        "segments": (
            SegmentEntry(owner=0, seq=0, size_bytes=9, sha256="a" * 64, index_bytes=3, index_sha256="b" * 64),
        ),
        "statistics": Statistics(total_elements=11, changed_elements=1, dense_bytes=32, segment_bytes=9),
    }
    return Manifest(**{**fields, **changes})
