#!/usr/bin/env python3
"""Writes the golden files of the format: small runs, object by object, with the checkpoints they must lead to.

Files of a released format version never change; --replace is for a version that is not released yet.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dcr_s3 import Receiver, Sender, init_run
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.document import FORMAT_MAJOR
from dcr_s3.format.keys import manifest_key, owner_key
from dcr_s3.format.manifest import Manifest
from dcr_s3.format.owner import OwnerList
from dcr_s3.format.region import Region
from dcr_s3.format.signature import SharedSecret
from dcr_s3.store import Store, open_store
from dcr_s3.store.memory import MemoryStore
from dcr_s3.testing.checkpoints import SHAPES, State, Tensor, changed, make_state, save
from dcr_s3.upkeep import make_fold
from dcr_s3.world import World, living_in

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden" / f"v{FORMAT_MAJOR}"
SECRET = b"the golden runs' secret, known to all"


class Kind(NamedTuple):
    """What sets one golden run apart."""

    context: bool
    signer: SharedSecret | None = None


RUNS = {"context": Kind(True), "context-free": Kind(False), "signed": Kind(True, SharedSecret(SECRET))}


class StillWorld(World):
    """Time stands and tokens count, so that the same script writes the same files."""

    def __init__(self) -> None:
        self._tokens = 0

    def time(self) -> float:
        return 1_767_225_600.0

    def token(self, size_bytes: int) -> str:
        self._tokens += 1
        return self._tokens.to_bytes(size_bytes, "big").hex()


def versions() -> list[State]:
    """Version 0 and what is published after it: every cell width, sparse, dense, emptied, unchanged."""
    rng = np.random.default_rng(7)
    base = make_state(1, {**SHAPES, "weights": ("BF16", (120, 100))})
    sparse = changed(base, 2, 0.02)
    for name, tensor in base.items():
        if tensor.dtype.name == "BF16":
            cells = (rng.normal(0, 0.02, tensor.cells.size).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
            cells[:4] = [0x7FC1, 0x8000, 0xFF80, 0x0001][: cells.size]  # a NaN's payload, -0, -inf, a subnormal
            # As an optimizer does it: the smaller a weight, the likelier its stored bits move.
            moved = cells ^ (rng.random(cells.size) < 0.3 * ((cells & 0x7FFF) < 0x3B80))
            base[name] = Tensor(tensor.dtype, tensor.shape, cells)
            sparse[name] = Tensor(tensor.dtype, tensor.shape, moved.astype("<u2"))
    dense = changed(sparse, 3, 0.9)
    emptied = {n: Tensor(t.dtype, t.shape, np.zeros_like(t.cells)) for n, t in dense.items()}
    return [base, sparse, dense, emptied, emptied]


def publish_by_halves(sender: Sender, state: State) -> None:
    """Every matrix as two column halves, as a row-parallel trainer holds them: strided regions."""
    with sender.version(step=len(state)) as version:
        for number, spec in enumerate(sender.run.tensors):
            tensor = state[spec.name]
            rows, columns = tensor.shape if len(tensor.shape) == 2 else (1, tensor.cells.size)
            for start, end in ((0, columns // 2), (columns // 2, columns)):
                if rows and end > start:
                    region = Region(number, start, (rows, end - start), (columns, 1))
                    version.add_piece(region, region.gather(tensor.cells).copy())


def owner_list(manifest: Manifest) -> OwnerList:
    """What the only owner of a version would have said of its share."""
    gain = StateDigest.from_hex(manifest.state_after) - StateDigest.from_hex(manifest.state_before)
    return OwnerList(
        run_id=manifest.run_id,
        version=manifest.version,
        attempt=manifest.attempt,
        owner=0,
        segments=manifest.segments,
        gain=gain.hex(),
        touched=manifest.touched,
        changed_elements=manifest.statistics.changed_elements,
    )


def write_run(directory: Path, kind: Kind, work: Path) -> None:
    """One run: the base, all objects in the bucket, the checkpoint of its newest version."""
    states = versions()
    bare = MemoryStore()
    store = open_store(bare, signer=kind.signer)
    base = save(states[0], directory / "base", shards=2)
    with living_in(StillWorld()):
        init_run(store, base, upload_base=True, context=kind.context, state_dir=work / "state", workers=0)
        with Sender.open(store, state_dir=work / "state", workers=0) as sender:
            for number, state in enumerate(states[1:]):
                if number == 1:
                    publish_by_halves(sender, state)
                else:
                    sender.publish(save(state, work / f"v{number}"), step=number)
            Receiver(store, work / "mirror", name="golden", workers=0).pull()
            sender.release(sender.position.version, ["golden"])
        make_fold(store, work / "folder", to_version=3, workers=0)
        manifest = Manifest.from_bytes(body(store, manifest_key(3)), where="version 3")
        mine = owner_list(manifest)
        store.put(owner_key(mine.version, mine.attempt, mine.owner), mine.to_bytes())
    save(states[-1], directory / "newest")
    save(states[2], directory / "version-3")
    for info in bare.list(""):
        path = directory / "objects" / info.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body(bare, info.key))


def body(store: Store, key: str) -> bytes:
    """A small object's bytes."""
    found = store.get(key, limit_bytes=1 << 24)
    assert found is not None
    return found.body


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replace", action="store_true", help="write the files of this format version anew")
    replace = parser.parse_args().replace
    for name, kind in RUNS.items():
        directory = GOLDEN / name
        if directory.exists() and not replace:
            print(f"{directory.name}: is there already and stays (see --replace)")
            continue
        shutil.rmtree(directory, ignore_errors=True)
        with tempfile.TemporaryDirectory() as work:
            write_run(directory, kind, Path(work))
        print(f"{directory.name}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
