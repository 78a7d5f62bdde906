"""Several owners of one run, each in a thread of its own: all commit, or nobody does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from dcr_s3 import PublishReport, init_run
from dcr_s3.delta import tensor_key
from dcr_s3.errors import BadInput, OwnerFailed, UnknownOutcome
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.keys import OWNER_PREFIX, SEGMENT_PREFIX
from dcr_s3.format.region import Region
from dcr_s3.reading import load_run, read_manifest
from dcr_s3.replay import Replay
from dcr_s3.sender import Sender
from dcr_s3.sending.owners import Owners
from dcr_s3.store.memory import MemoryStore
from dcr_s3.store.metered import MeteredStore
from dcr_s3.targets.mirror import MemoryMirror
from dcr_s3.targets.shard import ShardMirror, measure_pieces
from dcr_s3.workers import InlineExecutor

ROWS, COLUMNS = 64, 48
SESSION = "0123456789ab"


class Trainer:
    """A matrix cut by rows and a vector cut in halves, for two owners; ``new`` is what they publish."""

    def __init__(self, store: MemoryStore, timeout_s: float = 30.0) -> None:
        generator = np.random.default_rng(5)
        self.store = store
        self.old = [generator.integers(0, 60000, n).astype("<u2") for n in (ROWS * COLUMNS, 10)]
        self.new = [cells.copy() for cells in self.old]
        base = {
            "matrix": torch.from_numpy(self.old[0].view("<i2")).view(torch.bfloat16).reshape(ROWS, COLUMNS),
            "vector": torch.from_numpy(self.old[1].view("<i2")).view(torch.bfloat16),
        }
        init_run(store, base)
        self.run, self.start = load_run(store)
        half = ROWS // 2 * COLUMNS
        self.regions = [
            [Region.run(0, 0, half), Region.run(1, 0, 5)],
            [Region(0, half, (ROWS // 2, COLUMNS), (COLUMNS, 1)), Region.run(1, 5, 5)],
        ]
        self.senders = [self._open(owner, timeout_s) for owner in range(2)]

    def _open(self, owner: int, timeout_s: float) -> Sender:
        keys = [tensor_key(t.name, t.type, t.shape) for t in self.run.tensors]
        pieces = {r: r.gather(self.old[r.tensor]).copy() for r in self.regions[owner]}
        mirror = ShardMirror(
            self.run.tensors, self.start, measure_pieces(pieces.items(), keys, InlineExecutor()), pieces
        )
        if owner:
            mirror.position = self.senders_position
        metered = MeteredStore(self.store)
        owners = Owners(metered, owner, 2, timeout_s=timeout_s)
        sender = Sender.share(metered, self.run, self.start, mirror, owners, SESSION, fence=owner == 0, workers=0)
        self.senders_position = sender.position
        return sender

    def change(self, share: float = 0.1) -> None:
        for cells in self.new:
            cells[: max(1, int(len(cells) * share))] ^= 1
            cells[-1] ^= 1

    def publish(self, owner: int, fault: Callable[[], None] = lambda: None, tries: int | None = None) -> PublishReport:
        with self.senders[owner].version(tries=tries) as writer:
            for region in self.regions[owner]:
                writer.add_piece(region, region.gather(self.new[region.tensor]))
            fault()
        return writer.report

    def both(self, faults: dict[int, Callable[[], None]]) -> list[PublishReport | BaseException]:
        """What came of publishing on both owners at once."""
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(self.publish, n, faults.get(n, lambda: None)) for n in range(2)]
            return [f.exception() or f.result() for f in futures]


@pytest.fixture(autouse=True)
def _many_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sender, "least_segment_bytes", 1)


@pytest.fixture
def trainer(memory_store: MemoryStore) -> Iterator[Trainer]:
    made = Trainer(memory_store)
    yield made
    for sender in made.senders:
        sender.close()


def follower(trainer: Trainer) -> Replay:
    """A receiver of the run, at version 0."""
    digests = [StateDigest.from_hex(t.digest) for t in trainer.run.tensors]
    mirror = MemoryMirror(trainer.run.tensors, trainer.start, digests, [cells.copy() for cells in trainer.old])
    inline = InlineExecutor()
    return Replay(trainer.store, trainer.run, trainer.start, mirror, decoders=inline, fetchers=inline)


def check(replay: Replay, trainer: Trainer) -> None:
    for _ in replay.catch_up():
        pass
    for number, wanted in enumerate(trainer.new):
        np.testing.assert_array_equal(replay.mirror.cells(number), wanted)


def crash() -> None:
    raise BadInput("tensor vector: something is wrong with it")


def test_both_owners_segments_make_one_version(trainer: Trainer) -> None:
    for version in (2, 3):
        trainer.change()
        reports = trainer.both({})
        assert [r.version for r in reports] == [version, version]
        assert reports[0].changed_elements == reports[1].changed_elements > 0
        manifest, _ = read_manifest(trainer.store, version)
        assert {s.owner for s in manifest.segments} == {0, 1}
        assert manifest.touched == ((0, 1),)
        check(follower(trainer), trainer)


@pytest.mark.parametrize("broken", [0, 1])
def test_a_failing_owner_fails_the_version_everywhere_and_the_next_one_makes_up_for_it(
    trainer: Trainer, broken: int
) -> None:
    trainer.change()
    results = trainer.both({broken: crash})
    assert isinstance(results[broken], BadInput)
    other = results[1 - broken]
    assert isinstance(other, OwnerFailed)
    assert "tensor vector: something is wrong with it" in str(other)
    assert [s.position.version for s in trainer.senders] == [1, 1]
    assert not list(trainer.store.list(SEGMENT_PREFIX))
    results = trainer.both({})
    assert [r.version for r in results] == [2, 2]
    check(follower(trainer), trainer)


def test_owners_that_counted_differently_agree_on_an_attempt(trainer: Trainer) -> None:
    trainer.change()
    with pytest.raises(BadInput):
        trainer.publish(0, crash)
    with ThreadPoolExecutor(2) as pool:
        reports = [f.result() for f in [pool.submit(trainer.publish, n, tries=1) for n in range(2)]]
    assert [r.version for r in reports] == [2, 2]


def test_a_silent_owner_is_named(memory_store: MemoryStore) -> None:
    trainer = Trainer(memory_store, timeout_s=0.2)
    trainer.change()
    with pytest.raises(OwnerFailed, match=r"version 2: owner 1 did not finish within 0.2 s"):
        trainer.publish(0)
    assert trainer.senders[0].position.version == 1
    with pytest.raises(OwnerFailed, match="owner 1 did not finish"):
        trainer.publish(1)


def test_without_owner_0_nobody_knows(memory_store: MemoryStore) -> None:
    trainer = Trainer(memory_store, timeout_s=0.1)
    trainer.change()
    with pytest.raises(UnknownOutcome, match=r"owner 0 has neither committed nor given up within 0\.2 s"):
        trainer.publish(1)
    assert trainer.senders[1].stopped is not None


def test_the_lists_of_a_committed_version_stay_out_of_the_way_of_a_single_owner(memory_store: MemoryStore) -> None:
    trainer = Trainer(memory_store)
    trainer.change()
    trainer.both({})
    assert [o.key for o in memory_store.list(OWNER_PREFIX)] == [f"owners/000000000002/000001-{SESSION}-0000/00001.json"]


def test_segments_of_all_owners_are_fetched_before_the_commit(trainer: Trainer) -> None:
    trainer.change()
    trainer.both({})
    replay = follower(trainer)
    check(replay, trainer)
    trainer.change(0.3)
    ahead: list[bool] = []
    uploaded = threading.Barrier(2)

    def look() -> None:
        """Owner 1 looks once both owners' segments are in the bucket; owner 0 waits for it, and with it the commit."""
        uploaded.wait(10)
        while threading.current_thread() is looker[0] and replay.stage_ahead():
            ahead.append(True)
        uploaded.wait(10)

    looker: list[threading.Thread] = []

    def publish(owner: int) -> None:
        if owner == 1:
            looker.append(threading.current_thread())
        with trainer.senders[owner].version() as writer:
            for region in trainer.regions[owner]:
                writer.add_piece(region, region.gather(trainer.new[region.tensor]))
            writer.scan()
            writer._segments.finish()
            look()

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(publish, owner) for owner in range(2)]:
            future.result()
    manifest, _ = read_manifest(trainer.store, 3)
    assert len(ahead) == len(manifest.segments) >= 2
    check(replay, trainer)


def test_what_is_not_an_owners_piece_is_refused(trainer: Trainer) -> None:
    region = trainer.regions[1][0]
    with (
        pytest.raises(BadInput, match="tensor matrix: this sender owns pieces of shards"),
        trainer.senders[0].version() as writer,
    ):
        writer.add_piece(region, region.gather(trainer.new[0]))
        writer.scan()
    with pytest.raises(BadInput, match="version is incomplete"), trainer.senders[0].version():
        pass
