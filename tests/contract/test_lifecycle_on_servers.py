"""A run's whole life on real S3 servers: publish, fold, snapshot, delete, catch up, release."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcr_s3 import Receiver, Sender
from dcr_s3.format.signature import SharedSecret, Verifier
from dcr_s3.retention import gc
from dcr_s3.store.s3 import S3Store
from dcr_s3.testing.checkpoints import changed, differing, load, make_state, save
from dcr_s3.upkeep import make_fold, make_snapshot

SECRET = SharedSecret(b"k" * 32)
TRUSTED = Verifier([SECRET.verifier()])


@pytest.mark.parametrize("server", ["moto_store", "seaweed_store"])
def test_a_whole_life(server: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    store: S3Store = request.getfixturevalue(server)
    state = make_state(0)
    base = save(state, tmp_path / "base", shards=2)

    def receiver(name: str, **options: object) -> Receiver:
        return Receiver(store, tmp_path / name, name=name, verifier=TRUSTED, workers=0, **options)

    with Sender.open(store, base=base, state_dir=tmp_path / "state", signer=SECRET, workers=0) as sender:
        sender.publish(save(state := changed(state, 1), tmp_path / "new", shards=2))
        receiver("late", base=base).pull()
        receiver("folder", base=base).pull()
        for seed in range(2, 9):
            sender.publish(save(state := changed(state, seed), tmp_path / "new", shards=2))
        assert make_fold(store, tmp_path / "folder", signer=SECRET, workers=0).made
        assert make_snapshot(store, tmp_path / "folder", signer=SECRET, workers=0).made
        abandoned = store.open_multipart("segments/000000000003/000000-aaaaaaaaaaaa-0000/00000-000000.dcr")
        report = gc(store, min_age_s=0, keep_versions=1, dry_run=False, workers=0)
        abandoned.abort()
        assert report.held == {"late": 2, "folder": 2}
        assert [o.why for o in report.objects if o.key.startswith("segments/000000000004/")] != []
        receiver("late").pull()
        receiver("new").pull()
        assert sender.wait_for(9, ["late", "new"], timeout_s=0) == ["late", "new"]
        assert sender.release(9, ["late", "new"]).version == 9
        assert sender.release(5, ["late"]).version == 9
        assert receiver("careful", released_only=True).pull().version == 9
        receiver("follower").follow(until_version=9, poll_interval_s=0.05)
    for name in ("late", "new", "careful", "follower"):
        assert differing(load(tmp_path / name), state) == []
