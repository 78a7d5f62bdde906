"""Planted bugs: each breaks one rule of the protocol in the real code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest

from dcr_s3 import folding, following, joint, receiver, replay, retention, sender
from dcr_s3.errors import CommitConflict, OwnerFailed, PreconditionFailed, StoreUnavailable, UnknownOutcome
from dcr_s3.format.keys import OWNER_PREFIX, RELEASE_KEY, manifest_key
from dcr_s3.format.manifest import Manifest
from dcr_s3.format.owner import OwnerList
from dcr_s3.protocol.position import Position
from dcr_s3.reading import fetch_manifest
from dcr_s3.sending import commit as committing
from dcr_s3.sending import owners
from dcr_s3.sending.segments import SegmentWriter
from dcr_s3.sending.version import VersionWriter
from dcr_s3.store.base import Store
from dcr_s3.store.trusted import TrustedStore
from dcr_s3.targets import directory
from dcr_s3.targets.directory import DirectoryMirror
from dcr_s3.targets.redo import RedoWriter
from dcr_s3.testing.sim.world import SimWorld

Patch = pytest.MonkeyPatch


def manifest_before_segments(patch: Patch) -> None:
    """Segments are uploaded only after the manifest that names them."""
    complete, late = SegmentWriter._complete, []

    def postponed(writer: Any, segment: Any, entry: Any) -> Any:
        late.append(lambda: complete(writer, segment, entry))
        return entry

    def commit(store: Store, manifest: Manifest) -> bytes:
        body = committing.commit(store, manifest)
        while late:
            late.pop(0)()
        return body

    patch.setattr(SegmentWriter, "_complete", postponed)
    patch.setattr(sender, "commit", commit)


def lost_reply_taken_for_success(patch: Patch) -> None:
    """A commit whose reply was lost counts as committed."""

    def commit(store: Store, manifest: Manifest) -> bytes:
        try:
            store.put(manifest_key(manifest.version), bytearray(manifest.to_bytes()), if_absent=True)
        except StoreUnavailable:
            pass
        except PreconditionFailed:
            raise CommitConflict("another sender was faster") from None
        return manifest.to_bytes()

    patch.setattr(sender, "commit", commit)


def no_read_back(patch: Patch) -> None:
    """A refused create counts as lost, whoever made the object that is there."""

    def commit(store: Store, manifest: Manifest) -> bytes:
        try:
            store.put(manifest_key(manifest.version), bytearray(manifest.to_bytes()), if_absent=True)
        except PreconditionFailed:
            raise CommitConflict("another sender was faster") from None
        return manifest.to_bytes()

    patch.setattr(sender, "commit", commit)


def commit_without_condition(patch: Patch) -> None:
    """The manifest overwrites whatever is there."""

    def commit(store: Store, manifest: Manifest) -> bytes:
        store.put(manifest_key(manifest.version), bytearray(manifest.to_bytes()))
        return manifest.to_bytes()

    patch.setattr(sender, "commit", commit)


def no_fence(patch: Patch) -> None:
    """A sender that takes over does not say so."""
    patch.setattr(sender.Sender, "_fence", lambda self: setattr(self, "_epoch", self._epoch + 1))


def abort_after_unknown_outcome(patch: Patch) -> None:
    """Segments are deleted although the manifest that names them may exist."""
    leave = VersionWriter.__exit__

    def leave_and_clean(writer: Any, *error: Any) -> None:
        try:
            leave(writer, *error)
        except Exception as trouble:
            writer._abort(trouble)
            raise

    patch.setattr(VersionWriter, "__exit__", leave_and_clean)


def fold_aborted_after_unknown_outcome(patch: Patch) -> None:
    """The same, for folds."""
    create = folding.Folder._create

    def create_or_clean(folder: Any, fold: Any, writer: Any) -> Any:
        try:
            return create(folder, fold, writer)
        except Exception:
            writer.abort()
            raise

    patch.setattr(folding.Folder, "_create", create_or_clean)


def baseline_moved_on_upload(patch: Patch) -> None:
    """The sender's baseline is brought to the new version before that is committed."""
    settle = sender.Sender._commit_draft

    def commit_draft(self: Any, writer: Any, draft: Any, attempt: str, before: int) -> Any:
        advance, made = self._advance, self._manifest

        def manifest(kind: Any, whole: Any, step: Any) -> Manifest:
            result = made(kind, whole, step)
            advance(result.to_bytes(), draft)
            return result

        self._manifest, self._advance = manifest, lambda body, _: Manifest.from_bytes(body, where="")
        try:
            return settle(self, writer, draft, attempt, before)
        finally:
            del self._manifest, self._advance

    patch.setattr(sender.Sender, "_commit_draft", commit_draft)


def keys_used_again(patch: Patch) -> None:
    """All attempts at a version write to the same keys."""
    patch.setattr(sender, "attempt_name", lambda epoch, session, tries: "000000-000000000000-0000")


def applied_before_proved(patch: Patch) -> None:
    """Cells are overwritten while segments are still being staged, under a state that says clean."""
    stage = replay.Replay._stage

    def stage_and_apply(self: Any, *arguments: Any) -> Any:
        staged = stage(self, *arguments)
        staged.redo._file.flush()
        self.mirror.apply_files([staged.redo.path], self._decoders)
        return staged

    patch.setattr(replay.Replay, "_stage", stage_and_apply)


def clean_before_applied(patch: Patch) -> None:
    """The state file names the new version before the cells are written."""
    apply_files = DirectoryMirror.apply_files

    def advance(self: Any, target: Position, redo: Sequence[Any], digests: Any, executor: Any) -> None:
        for writer in redo:
            writer.close()
        directory._write_digests(self.directory, target.version, digests)
        names = (*self._state.journals, *(w.path.name for w in redo))
        self.position, self.digests = target, list(digests)
        self._write("clean", journals=names)
        apply_files(self, [w.path for w in redo], executor)
        self._sweep()

    patch.setattr(DirectoryMirror, "advance", advance)


def journal_not_synced(patch: Patch) -> None:
    """Redo files are left to the page cache."""

    def close(self: Any) -> None:
        if not self._file.closed:
            self._file.close()

    patch.setattr(RedoWriter, "close", close)


def journal_not_repeated(patch: Patch) -> None:
    """After an interruption the state is taken for finished."""

    def recover(self: Any) -> None:
        self.position = self._state.target or self._state.position
        self._write("clean", journals=self._state.journals)
        self._sweep()

    patch.setattr(DirectoryMirror, "_recover", recover)


def journal_repeated_backwards(patch: Patch) -> None:
    """Redo files are repeated newest first."""
    apply_files = DirectoryMirror.apply_files

    def backwards(self: Any, paths: Sequence[Path], executor: Any) -> None:
        apply_files(self, list(reversed(paths)), executor)

    patch.setattr(DirectoryMirror, "apply_files", backwards)


def journal_dropped_before_cells_are_durable(patch: Patch) -> None:
    """The journal goes without the cells having been written to disk."""

    def flush(self: Any) -> None:
        if self._state.journals:
            self._write("clean", journals=())
            self._sweep()

    patch.setattr(DirectoryMirror, "flush", flush)


def renames_not_synced(patch: Patch) -> None:
    """Directories are never made durable."""
    patch.setattr(SimWorld, "sync_directory", lambda self, path: None)


def acknowledged_before_applied(patch: Patch) -> None:
    """A receiver acknowledges what it is about to apply."""
    pull = receiver.Receiver.pull

    def hasty(self: Any, **arguments: Any) -> Any:
        with self._open() as (store, replay):
            found = fetch_manifest(store, replay.mirror.position)
            if found is not None:
                replay.mirror.position = found[1]
                self._acknowledger(store).send(replay.mirror.position)
        return pull(self, **arguments)

    patch.setattr(receiver.Receiver, "pull", hasty)


def nothing_checked(patch: Patch) -> None:
    """No digest is compared: not of segments, not of blocks, not of the state."""
    _trust_segments(patch)
    patch.setattr(replay, "totals", lambda changes: (ANY, ANY))
    patch.setattr(replay.Replay, "_prove", _unproved)


def fetched_ahead_trusted(patch: Patch) -> None:
    """A segment fetched before its commit is taken for what was committed, and nothing else is compared."""
    take = replay.Replay._take_ahead

    def take_any(self: Any, key: str, entry: Any, staged: Any) -> bool:
        found = self._fetched_ahead().get(key)
        return take(self, key, entry if found is None else SimpleNamespace(sha256=found.sha256), staged)

    patch.setattr(replay.Replay, "_take_ahead", take_any)
    patch.setattr(replay, "totals", lambda changes: (ANY, ANY))
    patch.setattr(replay.Replay, "_prove", _unproved)


def no_grace(patch: Patch) -> None:
    """Retention deletes what may still be in the making."""
    patch.setattr(retention._Facts, "is_old", lambda self, modified_at: True)


def retention_forgets_who_needs_what(patch: Patch) -> None:
    """Retention keeps nothing but the last version."""
    patch.setattr(retention, "needed", lambda edges, old, held, wanted, keep: set())


def _trust_segments(patch: Patch) -> None:
    def fetch(self: Any, key: str, entry: Any, name: str) -> bytearray:
        body = bytearray(entry.size_bytes)
        self.store.read_into(key, 0, memoryview(body))
        return body

    patch.setattr(replay.Replay, "_fetch", fetch)


def _unproved(self: Any, name: str, target: Any, staged: Any) -> Any:
    digests = list(self.mirror.digests)
    for change in (c for s in staged for c in s.changes):
        digests[change.tensor] += change.new - change.old
    return digests


def owners_not_waited_for(patch: Patch) -> None:
    """The committer takes the lists that are there when it looks, and calls that the version."""

    def gather(self: Any, mine: OwnerList) -> OwnerList:
        others = [self._read(mine, n) for n in range(self.count) if n != self.owner]
        return owners.merge([mine, *(o for o in others if o is not None and o.error is None)])

    patch.setattr(owners.Owners, "gather", gather)


def any_attempts_list_taken(patch: Patch) -> None:
    """The committer takes an owner's list of a version whichever attempt, hence epoch, it belongs to."""

    def read(self: Any, mine: OwnerList, owner: int) -> OwnerList | None:
        for info in self._store.list(f"{OWNER_PREFIX}{mine.version:012d}/"):
            if owner and info.key.endswith(f"/{owner:05d}.json"):
                found = OwnerList.from_bytes(self._store.get(info.key, limit_bytes=1 << 20).body, where=info.key)
                if found.error is None:
                    return found
        return read_own(self, mine, owner)

    read_own = owners.Owners._read
    patch.setattr(owners.Owners, "_read", read)


def failed_owner_committed_without(patch: Patch) -> None:
    """An owner that says it has failed counts as one without changes."""
    read = owners.Owners._read

    def forgiving(self: Any, mine: OwnerList, owner: int) -> OwnerList | None:
        found = read(self, mine, owner)
        return found.model_copy(update={"error": None}) if found is not None and owner else found

    patch.setattr(owners.Owners, "_read", forgiving)


def follower_deletes_after_unknown_outcome(patch: Patch) -> None:
    """An owner that hears nothing of the commit takes its segments away."""
    follow = owners.Owners.follow

    def hasty(self: Any, mine: OwnerList) -> bytes:
        try:
            return follow(self, mine)
        except UnknownOutcome as error:
            raise OwnerFailed(str(error)) from None

    patch.setattr(owners.Owners, "follow", hasty)


def released_without_condition(patch: Patch) -> None:
    """The release is looked at, and then written over whatever is there by then."""

    def around(self: Any, request: Any, send: Any) -> Any:
        if request.key == RELEASE_KEY and request.body is not None:
            return self.inner.put(RELEASE_KEY, self.signed(request.body))
        return trust(self, request, send)

    trust = TrustedStore.around
    patch.setattr(TrustedStore, "around", around)


def released_without_proof(patch: Patch) -> None:
    """A version is released though a required receiver has not proved it."""
    patch.setattr(joint, "lacking", lambda members, position, required, now: [])


def unreleased_applied(patch: Patch) -> None:
    """A receiver of released versions applies whatever is committed."""
    patch.setattr(receiver.Receiver, "_limit", lambda self, store, run_id, to_version: to_version)
    patch.setattr(following.Follower, "_look_released", following.Follower._look)


def lost_parts_not_noticed(patch: Patch) -> None:
    """An upload is completed with the parts that arrived."""

    def complete(self: Any, segment: Any, entry: Any) -> Any:
        if segment.upload is None:
            self._store.put(segment.key, segment.buffer)
        else:
            for part in segment.parts:
                part.exception()
            segment.upload.complete()
        return entry

    patch.setattr(SegmentWriter, "_complete", complete)
