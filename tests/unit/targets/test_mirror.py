"""A mirror directory: interrupted at any point it is what its state file says, and finishes what was begun."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import numpy as np
import pytest

from dcr_s3.delta import tensor_key
from dcr_s3.errors import BadInput, Busy, CorruptObject, DiskFull, StateMismatch
from dcr_s3.format.region import Region
from dcr_s3.format.run import Run, TensorSpec
from dcr_s3.protocol.position import Position, origin
from dcr_s3.targets import redo as redo_module
from dcr_s3.targets.checkpoint import Checkpoint, match_checkpoint
from dcr_s3.targets.directory import DirectoryMirror, acquire
from dcr_s3.targets.mirror import measure, total, verify_mirror
from dcr_s3.targets.redo import RedoRecord
from dcr_s3.targets.state import STATE_FILE, read_state
from dcr_s3.testing.checkpoints import State, changed, differing, load, make_state, save
from dcr_s3.workers import InlineExecutor
from dcr_s3.world import World, living_in

OLD = make_state(1)
NEW = changed(OLD, 2, 0.2)
HERE = InlineExecutor()


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the process survives it."""


class DyingWorld(World):
    """Raises at the nth operation on the disk."""

    def __init__(self, lives: int) -> None:
        self.lives = lives

    def spend(self) -> None:
        self.lives -= 1
        if self.lives < 0:
            raise Killed

    def sync(self, file) -> None:  # type: ignore[no-untyped-def]
        self.spend()
        super().sync(file)
        self.spend()

    def replace(self, source: Path, target: Path) -> None:
        self.spend()
        super().replace(source, target)
        self.spend()

    def unlink(self, path: Path) -> None:
        self.spend()
        super().unlink(path)


def digests_of(state: State) -> list:  # type: ignore[type-arg]
    cells = [t.cells for t in state.values()]
    return measure(cells, [tensor_key(n, t.dtype, t.shape) for n, t in state.items()], HERE)


def make_run() -> Run:
    digests = digests_of(OLD)
    specs = tuple(
        TensorSpec(name=n, dtype=t.dtype.name, shape=t.shape, digest=d.hex())
        for (n, t), d in zip(OLD.items(), digests, strict=True)
    )
    return Run(run_id="1" * 32, created_at="now", state=total(digests).hex(), tensors=specs)


RUN = make_run()
START = origin(RUN, RUN.to_bytes())


def target_of(state: State, version: int = 1) -> Position:
    return START.model_copy(
        update={"version": version, "sha256": f"{version:064d}", "state": total(digests_of(state)).hex()}
    )


def make_mirror(directory: Path) -> DirectoryMirror:
    save(OLD, directory, shards=2)
    return DirectoryMirror.adopt(directory, RUN, START, digests_of(OLD), acquire(directory))


def advance(mirror: DirectoryMirror, old: State, new: State, version: int = 1) -> None:
    writer = mirror.redo(f"{version}")
    for number, name in enumerate(old):
        positions = np.flatnonzero(old[name].cells != new[name].cells).astype("<u4")
        if positions.size:
            region = (Region.run(number, 0, old[name].cells.size),)
            writer.append(RedoRecord(region, positions, new[name].cells[positions]))
    mirror.advance(target_of(new, version), [writer], digests_of(new), HERE)


def test_a_mirror_advances_and_says_so(tmp_path: Path) -> None:
    mirror = make_mirror(tmp_path)
    advance(mirror, OLD, NEW)
    assert differing(load(tmp_path), NEW) == []
    state = read_state(tmp_path)
    assert state is not None
    assert (state.version, state.status, state.position) == (1, "clean", mirror.position)
    assert verify_mirror(mirror, HERE).hex() == mirror.position.state


def test_killed_at_any_disk_operation_it_is_old_or_new_and_never_between(tmp_path: Path) -> None:
    seen = set()
    for lives in range(200):
        directory = tmp_path / str(lives)
        mirror = make_mirror(directory)
        with living_in(DyingWorld(lives)):
            try:
                advance(mirror, OLD, NEW)
                finished = True
            except Killed:
                finished = False
        mirror.close()
        again = DirectoryMirror.open(directory, RUN)
        expected = {0: OLD, 1: NEW}[again.position.version]
        assert differing(load(directory), expected) == []
        assert verify_mirror(again, HERE).hex() == again.position.state
        state = read_state(directory)
        assert state is not None
        assert state.status == "clean"
        again.close()
        seen.add((again.position.version, finished))
        if finished:
            break
    assert seen == {(0, False), (1, False), (1, True)}


def test_killed_between_two_cells_the_journal_finishes_the_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = redo_module.apply_changes
    calls = 0

    def dying(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Killed
        real(*arguments)  # type: ignore[arg-type]

    mirror = make_mirror(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(redo_module, "apply_changes", dying)
        with pytest.raises(Killed):
            advance(mirror, OLD, NEW)
    state = read_state(tmp_path)
    assert state is not None
    assert state.status == "applying"
    assert state.target == target_of(NEW)
    assert differing(load(tmp_path), OLD) and differing(load(tmp_path), NEW)
    mirror.close()
    again = DirectoryMirror.open(tmp_path, RUN)
    assert again.position == target_of(NEW)
    assert differing(load(tmp_path), NEW) == []


def test_cells_lost_with_the_machine_come_back_from_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = changed(NEW, 3)
    mirror = make_mirror(tmp_path)
    advance(mirror, OLD, NEW)
    advance(mirror, NEW, newest, 2)
    mirror.close()
    for number, name in enumerate(OLD):
        mirror.cells(number)[...] = OLD[name].cells

    class Rebooted(World):
        def boot_id(self) -> str:
            return "another boot"

    with living_in(Rebooted()):
        again = DirectoryMirror.open(tmp_path, RUN)
    assert again.position.version == 2
    assert differing(load(tmp_path), newest) == []


def test_flush_makes_the_journal_unnecessary(tmp_path: Path) -> None:
    mirror = make_mirror(tmp_path)
    advance(mirror, OLD, NEW)
    assert list((tmp_path / ".dcr").glob("*.redo"))
    mirror.flush()
    assert not list((tmp_path / ".dcr").glob("*.redo"))
    state = read_state(tmp_path)
    assert state is not None
    assert state.journals == ()


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    class FullDisk(World):
        def sync(self, file) -> None:  # type: ignore[no-untyped-def]
            raise OSError(errno.ENOSPC, "No space left on device")

    mirror = make_mirror(tmp_path)
    with living_in(FullDisk()), pytest.raises(DiskFull, match="nothing is lost"):
        advance(mirror, OLD, NEW)
    assert differing(load(tmp_path), OLD) == []
    mirror.close()
    again = DirectoryMirror.open(tmp_path, RUN)
    advance(again, OLD, NEW)
    assert differing(load(tmp_path), NEW) == []


def test_verify_names_the_tensor_whose_bit_flipped(tmp_path: Path) -> None:
    mirror = make_mirror(tmp_path)
    advance(mirror, OLD, NEW)
    mirror.cells(list(OLD).index("layer.0.q"))[7] ^= 1
    with pytest.raises(StateMismatch, match=r"version 1: tensor layer\.0\.q does not"):
        verify_mirror(mirror, HERE)


def test_two_processes_cannot_use_one_directory(tmp_path: Path) -> None:
    mirror = make_mirror(tmp_path)
    with pytest.raises(Busy, match="another process"):
        DirectoryMirror.open(tmp_path, RUN)
    mirror.close()
    DirectoryMirror.open(tmp_path, RUN).close()


def test_a_directory_of_another_run_is_refused(tmp_path: Path) -> None:
    make_mirror(tmp_path).close()
    other = RUN.model_copy(update={"run_id": "2" * 32})
    with pytest.raises(BadInput, match="mirrors run 1111"):
        DirectoryMirror.open(tmp_path, other)
    DirectoryMirror.open(tmp_path, RUN).close()


@pytest.mark.parametrize("body", [b"", b"{}", b'{"magic":"dcr_s3/mirror"}'])
def test_a_damaged_state_file_is_refused_by_name(tmp_path: Path, body: bytes) -> None:
    make_mirror(tmp_path).close()
    (tmp_path / STATE_FILE).write_bytes(body)
    with pytest.raises(CorruptObject, match=STATE_FILE):
        DirectoryMirror.open(tmp_path, RUN)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s.pop("mask"), "lacks tensor mask"),
        (lambda s: s.update(extra=s["mask"]), "has tensor extra, unknown"),
        (lambda s: s.update(mask=s["steps"]), r"tensor mask is I64 \[3\], the run has BOOL \[7\]"),
    ],
)
def test_tensors_that_do_not_fit_the_run_are_named(tmp_path: Path, spoil, message: str) -> None:  # type: ignore[no-untyped-def]
    state = dict(OLD)
    spoil(state)
    save(state, tmp_path)
    with pytest.raises(BadInput, match=message):
        match_checkpoint(Checkpoint.open(tmp_path), RUN.tensors)


def test_the_state_file_is_for_readers_too(tmp_path: Path) -> None:
    mirror = make_mirror(tmp_path)
    advance(mirror, OLD, NEW)
    raw = json.loads((tmp_path / STATE_FILE).read_bytes())
    assert (raw["version"], raw["status"], raw["position"]["run_id"]) == (1, "clean", RUN.run_id)
