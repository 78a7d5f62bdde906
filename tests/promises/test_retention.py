"""Retention: nothing that a permitted receiver needs, nothing young, nothing without being asked twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from dcr_s3 import retention
from dcr_s3.catalogue import Catalogue, read_catalogue
from dcr_s3.errors import BadInput, CorruptObject, Forbidden
from dcr_s3.folding import Folder
from dcr_s3.format.keys import manifest_key, segment_key, snapshot_marker_key
from dcr_s3.mirroring import open_mirror
from dcr_s3.reading import load_run
from dcr_s3.retention import GcReport, gc
from dcr_s3.snapshots import publish_snapshot
from dcr_s3.store.base import Store
from dcr_s3.store.wrapped import Request, WrappedStore
from dcr_s3.workers import InlineExecutor

Trial = Any
HERE = InlineExecutor()
DAY = 86_400.0


def collect(trial: Trial, **options: Any) -> GcReport:
    return gc(trial.store, **{"dry_run": False, "keep_versions": 1, "workers": 0, **options})


def upkeep(trial: Trial, *, fold_to: int | None = None, snapshot_at: int | None = None) -> None:
    run, start = load_run(trial.store)
    mirror = open_mirror(trial.store, run, start, trial.root / "upkeep", base=trial.root / "base", executor=HERE)
    with closing(mirror):
        if fold_to is not None:
            assert Folder(trial.store, run, start, mirror, coders=HERE, movers=HERE).fold(to_version=fold_to)
    if snapshot_at is not None:
        trial.receiver("upkeep", acknowledge=False).pull(to_version=snapshot_at)
        mirror = open_mirror(trial.store, run, start, trial.root / "upkeep", base=None, executor=HERE)
        with closing(mirror):
            publish_snapshot(trial.store, mirror, HERE)


def versions_there(trial: Trial) -> list[int]:
    return sorted({int(key.split("/")[1]) for key in trial.listed("segments/")})


def test_nothing_is_deleted_by_default(trial: Trial) -> None:
    trial.run(5)
    upkeep(trial, snapshot_at=5)
    trial.age(2 * DAY)
    trial.receiver("one").pull()
    before = trial.listed()
    report = gc(trial.store, keep_versions=1, workers=0)
    assert not report.deleted
    assert len(report.objects) == 4
    assert all(o.why == f"version {n}: every receiver has a cheaper way" for n, o in enumerate(report.objects, 1))
    assert trial.listed() == before


def test_nothing_young_is_deleted(trial: Trial) -> None:
    trial.run(5)
    upkeep(trial, snapshot_at=5)
    assert collect(trial).objects == []
    trial.age(2 * DAY, "segments/000000000001/")
    trial.age(2 * DAY, snapshot_marker_key(5))
    trial.age(2 * DAY, "manifests/")
    trial.receiver("one").pull()
    collect(trial)
    assert versions_there(trial) == [2, 3, 4, 5]


def test_without_a_snapshot_the_chain_stays(trial: Trial) -> None:
    trial.run(5)
    trial.age(2 * DAY)
    trial.receiver("one").pull()
    assert collect(trial).objects == []


def test_a_deletion_that_was_interrupted_leaves_nothing_half_that_looks_whole(trial: Trial) -> None:
    trial.run(6)
    upkeep(trial, snapshot_at=2)
    upkeep(trial, snapshot_at=6)
    trial.age(2 * DAY)
    trial.receiver("one").pull()
    report = gc(trial.store, keep_versions=1, workers=0)
    assert snapshot_marker_key(2) in [o.key for o in report.objects]
    for number in range(len(report.objects)):
        trial.store.delete([report.objects[number].key])
        new = f"new-{number}"
        assert trial.receiver(new, base=None, acknowledge=False).pull().version == 6
        trial.assert_holds(6, new)


def test_a_living_receiver_keeps_what_it_needs_and_an_expired_one_goes_by_the_snapshot(trial: Trial) -> None:
    trial.run(8)
    trial.receiver("gone", lease_s=60).pull(to_version=1)
    trial.receiver("late").pull(to_version=5)
    upkeep(trial, snapshot_at=4)
    trial.age(2 * DAY)
    trial.receiver("one").pull()
    report = collect(trial)
    assert report.held == {"late": 5, "one": 8}
    assert versions_there(trial) == [5, 6, 7, 8]
    for name in ("gone", "late"):
        assert trial.receiver(name).pull().version == 8
        trial.assert_holds(8, name)
    trial.receiver("new", base=None).pull()
    trial.assert_holds(8, "new")


def test_a_fold_takes_the_place_of_its_deltas_once_nobody_can_still_be_on_them(trial: Trial) -> None:
    trial.run(9)
    trial.receiver("late").pull(to_version=0)
    upkeep(trial, fold_to=6)
    upkeep(trial, snapshot_at=9)
    for prefix in ("segments/", "manifests/"):
        trial.age(2 * DAY, prefix)
    trial.receiver("one").pull()
    collect(trial)
    assert versions_there(trial) == list(range(1, 10))
    trial.age(2 * DAY, "folds/")
    trial.age(2 * DAY, "snapshots/")
    trial.receiver("one").pull()
    collect(trial)
    assert set(versions_there(trial)) < set(range(1, 10))
    trial.receiver("late").pull()
    trial.assert_holds(9, "late")


def test_the_way_to_the_released_version_stays(trial: Trial) -> None:
    with trial.sender(fence=False) as sender:
        for _ in range(6):
            trial.publish(sender)
        upkeep(trial, snapshot_at=2)
        trial.receiver("one").pull(to_version=4)
        sender.release(4, ["one"])
    upkeep(trial, snapshot_at=6)
    trial.age(2 * DAY)
    trial.receiver("one").pull()
    collect(trial)
    trial.receiver("careful", base=None, released_only=True).pull()
    trial.assert_holds(4, "careful")


def test_leftovers_of_lost_and_fenced_attempts_are_deleted_and_living_ones_stay(trial: Trial) -> None:
    with trial.sender() as sender:  # version 1 is its fence, of epoch 1
        trial.publish(sender)
        lost = segment_key(2, "000001-aaaaaaaaaaaa-0000", 0, 0)
        fenced = segment_key(3, "000000-bbbbbbbbbbbb-0000", 0, 0)
        living = segment_key(3, "000001-cccccccccccc-0000", 0, 0)
        stranger = "segments/notes.txt"
        for key in (lost, fenced, living, stranger):
            trial.store.put(key, b"x")
        uploads = {
            key: trial.store.open_multipart(key.replace("-000000.dcr", "-000001.dcr")) for key in (lost, fenced, living)
        }
        for upload in uploads.values():
            upload.started_at -= 2 * DAY
        assert sender.sweep().objects == []
        trial.age(2 * DAY, "segments/")
        report = sender.sweep()
    assert {o.key: o.why for o in report.objects} == {
        lost: "attempt at version 2 that lost",
        fenced: "attempt at version 3 by a sender that was fenced",
    }
    assert {lost, fenced}.isdisjoint(trial.listed())
    assert {living, stranger} <= set(trial.listed())
    assert [u.full_key for u in trial.bucket.uploads.values()] == [living.replace("-000000.dcr", "-000001.dcr")]
    trial.receiver("one").pull()
    trial.assert_holds(2)


def test_what_is_made_while_a_slow_deletion_looks_around_stays(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    trial.run(3)

    def slow(*arguments: Any) -> Catalogue:
        found = read_catalogue(*arguments)
        with trial.sender(fence=False) as sender:
            sender.snapshot()
            trial.age(3 * DAY)
            trial.publish(sender)
        return found

    monkeypatch.setattr(retention, "read_catalogue", slow)
    report = collect(trial, keep_versions=1)
    assert report.deleted
    assert trial.listed("snapshots/") != []
    trial.receiver("new", base=None).pull()
    trial.assert_holds(4, "new")


class Watched(WrappedStore):
    """Notes what is asked for, and refuses one kind of request."""

    def __init__(self, inner: Store, forbidden: str = "") -> None:
        super().__init__(inner)
        self.kinds: list[str] = []
        self._forbidden = forbidden

    def around(self, request: Request, send: Callable[[Request], Any]) -> Any:
        self.kinds.append(request.kind)
        if request.kind == self._forbidden:
            raise Forbidden(f"{request.kind} {request.key}: not allowed")
        return send(request)


def test_a_later_sender_drops_old_uploads_that_fenced_ones_left(trial: Trial) -> None:
    trial.sender().close()
    left = segment_key(2, "000001-aaaaaaaaaaaa-0000", 0, 0)
    living = segment_key(9, "000009-bbbbbbbbbbbb-0000", 0, 0)
    for key in (left, living):
        trial.store.open_multipart(key).upload_part(1, bytearray(b"begun"))
    trial.sender().close()  # both are young
    for upload in trial.bucket.uploads.values():
        upload.started_at -= 2 * DAY
    trial.sender(sweep_after_s=None).close()
    trial.sender(fence=False).close()
    trial.sender(sweep_after_s=3 * DAY).close()
    assert [u.full_key for u in trial.bucket.uploads.values()] == [left, living]
    trial.store = Watched(trial.store)
    trial.sender().close()
    assert [u.full_key for u in trial.bucket.uploads.values()] == [living]
    assert (trial.store.kinds.count("list_uploads"), trial.store.kinds.count("abort")) == (1, 1)


def test_a_sender_that_may_not_list_uploads_publishes_all_the_same(trial: Trial) -> None:
    trial.run(1)
    trial.store = Watched(trial.store, forbidden="list_uploads")
    with trial.sender() as sender:
        trial.publish(sender)
    assert "list_uploads" in trial.store.kinds
    trial.receiver().pull()
    trial.assert_holds(3)


def test_unfinished_folds_and_snapshots_are_deleted(trial: Trial) -> None:
    trial.run(4)
    upkeep(trial, fold_to=4, snapshot_at=4)
    lost_fold = "folds/000000000000-000000000003/000000-aaaaaaaaaaaa-0000/00000-000000.dcr"
    lost_snapshot = "snapshots/000000000004/aaaaaaaaaaaa/config.json"
    for key in (lost_fold, lost_snapshot):
        trial.store.put(key, b"x")
    trial.age(2 * DAY)
    trial.receiver("one").pull()
    report = collect(trial, uncommitted_only=True)
    assert sorted(o.key for o in report.objects) == [lost_fold, lost_snapshot]
    trial.receiver("new", base=None).pull()
    trial.assert_holds(4, "new")


def test_a_manifest_that_cannot_be_read_stops_it(trial: Trial) -> None:
    trial.run(3)
    trial.age(2 * DAY)
    trial.receiver("one").pull()
    trial.store.put(manifest_key(2), b"{}")
    before = trial.listed()
    with pytest.raises(CorruptObject, match="nothing is deleted"):
        collect(trial)
    assert trial.listed() == before


def test_nonsense_settings_are_refused(trial: Trial) -> None:
    trial.run(1)
    with pytest.raises(BadInput):
        collect(trial, min_age_s=-1)
    with pytest.raises(BadInput):
        collect(trial, keep_versions=0)
