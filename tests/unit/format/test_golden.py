"""Objects written by the first release of this format version lead to the same bits for ever."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dcr_s3 import Receiver, verify_directory
from dcr_s3.format.ack import Ack
from dcr_s3.format.codings import Coding
from dcr_s3.format.document import Document
from dcr_s3.format.fold import Fold
from dcr_s3.format.manifest import Manifest
from dcr_s3.format.owner import OwnerList
from dcr_s3.format.release import Release
from dcr_s3.format.run import Run
from dcr_s3.format.segment import parse_segment
from dcr_s3.format.signature import SharedSecret, Verifier, signed
from dcr_s3.format.snapshot import Snapshot
from dcr_s3.store import Store, open_store
from dcr_s3.store.memory import MemoryStore
from dcr_s3.testing.checkpoints import differing, load

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
RUNS = sorted(path for path in GOLDEN.glob("v*/*") if path.is_dir())
KINDS: dict[str, type[Document]] = {d.MAGIC: d for d in (Run, Manifest, Ack, Release, Snapshot, Fold, OwnerList)}
KEY = SharedSecret(b"the golden runs' secret, known to all")


def objects(run: Path) -> dict[str, bytes]:
    root = run / "objects"
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def bucket(run: Path) -> Store:
    store = MemoryStore()
    for key, body in objects(run).items():
        store.put(key, body)
    return open_store(store, signer=KEY, verifier=Verifier([KEY])) if run.name == "signed" else store


@pytest.mark.parametrize("run", RUNS, ids=lambda p: f"{p.parent.name}-{p.name}")
@pytest.mark.parametrize("start", ["base", "snapshot"])
def test_golden_runs_are_pulled_bit_for_bit(run: Path, start: str, tmp_path: Path) -> None:
    store = bucket(run)
    receiver = Receiver(store, tmp_path / "mirror", base=run / "base" if start == "base" else None)
    assert receiver.pull(to_version=3).version == 3
    assert differing(load(tmp_path / "mirror"), load(run / "version-3")) == []
    assert receiver.pull().version == 5
    assert differing(load(tmp_path / "mirror"), load(run / "newest")) == []
    assert verify_directory(store, run / "newest").version == 5


@pytest.mark.parametrize("run", RUNS, ids=lambda p: f"{p.parent.name}-{p.name}")
def test_golden_documents_are_read_and_written_alike(run: Path) -> None:
    seen = set()
    for key, body in objects(run).items():
        if key.endswith(".json") and b'"~sha256"' in body:
            kind = KINDS[json.loads(body)["magic"]]
            document = kind.from_bytes(body, where=key)
            # A receiver has no key to sign with.
            signer = KEY if run.name == "signed" and kind is not Ack else None
            assert signed(document.to_bytes(), signer) == body
            seen.add(kind)
    assert seen == set(KINDS.values())


def test_golden_runs_use_every_coding() -> None:
    used = {
        block.coding
        for run in RUNS
        for key, body in objects(run).items()
        if key.endswith(".dcr")
        for block in parse_segment(memoryview(body), where=key).blocks
    }
    assert used == set(Coding) - {Coding.NONE}
