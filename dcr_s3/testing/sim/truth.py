"""What is promised, and what really happened: looks at the bucket and at every mirror after each step."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from dcr_s3.format.keys import ACK_PREFIX, RELEASE_KEY, RUN_KEY, ack_key, manifest_key, manifest_version
from dcr_s3.store.memory import MemoryBucket
from dcr_s3.store.wrapped import Request
from dcr_s3.testing.sim.ledger import Claim, Ledger
from dcr_s3.testing.sim.model import FILE, TinyModel
from dcr_s3.testing.sim.simulation import Machine, Violation

STATE_FILE = "dcr_state.json"


Session = tuple[int, int]
"""The version at which a sender stood once it was open, and how many were opened before."""


@dataclass(eq=False)
class Intent:
    """One call of ``publish``: who wants which state to be the next version.

    ``session`` orders the openings of senders with a fence; None for one without.
    """

    author: str
    state: int
    session: Session | None = None


@dataclass(frozen=True)
class Commit:
    """One version: its manifest, and the state it stands for."""

    sha256: str
    state: int
    intent: Intent | None


@dataclass
class Mirrored:
    """A mirror on a machine, and what its state file said when last looked at. ``pattern`` is where it lies.

    Without a ``required`` one that has proved it no version is released; a ``cautious`` one applies no other.
    """

    machine: Machine
    pattern: str
    required: bool = False
    cautious: bool = False
    version: int = -1
    settled: bool = False
    acked: int = -1
    boots: int = 0
    _files: tuple[Path, Path] | None = None
    _last: tuple[bytes, Mapping[str, Any]] = (b"", {})

    def state(self) -> Mapping[str, Any] | None:
        """The state file; None before there is one."""
        if self._files is None:
            for directory in self.machine.root.glob(self.pattern):
                self._files = directory / STATE_FILE, directory / FILE
        if self._files is None or not self._files[0].exists():
            return None
        body = self._files[0].read_bytes()
        if body != self._last[0]:
            self._last = body, json.loads(body)
        return self._last[1]

    def bits(self) -> bytes | None:
        """The checkpoint's only file."""
        return self._files[1].read_bytes() if self._files is not None else None


class Truth:
    """Everything is remembered by the bytes themselves; none of the package's digests are trusted."""

    def __init__(self, bucket: MemoryBucket, model: TinyModel, mirrors: Mapping[str, Mirrored]) -> None:
        self.bucket = bucket
        self.model = model
        self.commits: dict[int, Commit] = {}
        self.newest = -1
        self.released = -1
        self._release: object = None
        self.fingerprint = 0
        self.mirrors = dict(mirrors)
        self.intents: dict[str, Intent | None] = {}
        self._ledger = Ledger()
        self._had_snapshot = False
        self._sessions: list[Session] = []

    def state(self) -> Hashable:
        """Equal where the same is still promised."""
        begun = tuple(sorted(upload.full_key for upload in self.bucket.uploads.values()))
        acked = tuple(m.acked for m in self.mirrors.values())
        return self.fingerprint, begun, max(self._sessions, default=None), acked

    # What processes tell

    def sending(self, intent: Intent | None, request: Request) -> None:
        """A request is about to go out."""
        if request.kind == "put" and manifest_version(request.key) is not None and request.body is not None:
            self.intents.setdefault(sha256(request.body).hexdigest(), intent)

    def opened(self, version: int) -> Session:
        """A sender was opened with a fence, and stands at ``version``: none that was opened before may commit from now
        on.
        """
        self._sessions.append((version, len(self._sessions)))
        return self._sessions[-1]

    def published(self, intent: Intent, version: int) -> None:
        """``publish`` has returned."""
        commit = self.commits.get(version)
        if commit is None or commit.intent is not intent or manifest_key(version) not in self.bucket.objects:
            raise Violation(f"{intent.author} was told that version {version} is committed, and it is not, or not its")

    def lost(self, intent: Intent) -> None:
        """``publish`` has said that another sender's version took its place."""
        for version, commit in self.commits.items():
            if commit.intent is intent:
                raise Violation(f"{intent.author} was told that it lost, but version {version} is its own")

    # What is checked after every step

    def check(self, actor: str) -> None:
        """``actor`` has done something to the bucket or to its disk. Raises ``Violation``."""
        self._check_bucket()
        if actor in self.mirrors:
            self._check_mirror(actor, self.mirrors[actor])

    def at_newest(self, name: str) -> bool:
        """True where a mirror holds the newest version."""
        return self.mirrors[name].settled and self.mirrors[name].version == self.newest

    def _check_bucket(self) -> None:
        objects = self.bucket.objects
        if objects == self._ledger.objects:
            return
        self.fingerprint = hash(frozenset((key, stored.etag) for key, stored in objects.items()))
        fresh, gone = self._ledger.update(objects)
        if RUN_KEY in fresh:
            self.commits[0] = Commit(sha256(objects[RUN_KEY].body).hexdigest(), 0, None)
            self.newest = 0
        for key in fresh:
            claim = self._ledger.claims.get(key)
            if claim is not None and claim.kind == "delta":
                self._commit(claim, objects[key].body)
            elif claim is not None and claim.kind == "snapshot":
                self._check_snapshot(claim)
        for key in (k for k in objects if k.startswith(ACK_PREFIX)):
            self._ack(key, objects[key].body)
        if objects.get(RELEASE_KEY) is not self._release:
            self._release = objects[RELEASE_KEY]
            self._check_release(json.loads(objects[RELEASE_KEY].body))
        self._ledger.require_whole()
        if gone:
            self._check_deleted(gone)

    def _commit(self, claim: Claim, body: bytes) -> None:
        digest = sha256(body).hexdigest()
        manifest = claim.document
        if claim.last != self.newest + 1 or manifest["parent"]["sha256"] != self.commits[claim.first].sha256:
            raise Violation(f"{claim.key} does not follow version {self.newest}")
        intent = self.intents.get(digest)
        if intent is not None and intent.session is not None and intent.session < max(self._sessions):
            raise Violation(f"{claim.key} is by {intent.author}, from whom another sender has taken over")
        previous = self.commits[claim.first].state
        state = previous if manifest["kind"] == "fence" or intent is None else intent.state
        self.commits[claim.last] = Commit(digest, state, intent)
        self.newest = claim.last

    def _check_release(self, document: Mapping[str, Any]) -> None:
        version = document["version"]
        if version < self.released:
            raise Violation(f"{RELEASE_KEY} went back from version {self.released} to {version}")
        commit = self.commits.get(version)
        if commit is None or commit.sha256 != document["sha256"]:
            raise Violation(f"{RELEASE_KEY} names a version {version} that was not committed like that")
        for name, mirrored in self.mirrors.items():
            if mirrored.required and mirrored.acked < version:
                raise Violation(f"version {version} was released, and {name} has not proved it")
        self.released = version

    def _check_snapshot(self, claim: Claim) -> None:
        commit = self.commits.get(claim.last)
        files = {n.key.rpartition("/")[2]: self.bucket.objects[n.key].body for n in claim.objects}
        if commit is None or files.get(FILE) != self.model.files[commit.state]:
            raise Violation(f"{claim.key} does not hold the bits of version {claim.last}")

    def _check_deleted(self, gone: Sequence[str]) -> None:
        for key in gone:
            if key == RUN_KEY or manifest_version(key) is not None:
                raise Violation(f"{key} was deleted")
        had_snapshot = self._had_snapshot = self._had_snapshot or "snapshot" in self._ledger.kinds
        starts = {name: m.version for name, m in self.mirrors.items() if m.version >= 0}
        starts |= {"a new receiver": -1} if had_snapshot else {}
        for name, start in starts.items():
            if not self._ledger.reaches(start, self.newest):
                raise Violation(f"{gone[0]} was deleted, and {name} can no longer get to version {self.newest}")

    def _ack(self, key: str, body: bytes) -> None:
        for name, mirrored in self.mirrors.items():
            if key == ack_key(name):
                mirrored.acked = max(mirrored.acked, json.loads(body)["version"])

    def _check_mirror(self, name: str, mirrored: Mirrored) -> None:
        machine, state = mirrored.machine, mirrored.state()
        version = -1 if state is None else state["position"]["version"]
        if version < mirrored.acked:
            raise Violation(f"{name} has acknowledged version {mirrored.acked} and holds {version}")
        # What a machine had not made durable may be gone after a power loss.
        if version < mirrored.version and mirrored.boots == machine.boots:
            raise Violation(f"{name} went back from version {mirrored.version} to {version}")
        mirrored.version, mirrored.boots = version, machine.boots
        if state is None:
            return
        if mirrored.cautious and version > max(0, self.released):
            raise Violation(f"{name} holds version {version}, of which {self.released} is released")
        replayed = not state["journals"] or state["boot_id"] == machine.boot_id
        mirrored.settled = state["status"] == "clean" and replayed
        commit = self.commits.get(version)
        if commit is None or commit.sha256 != state["position"]["sha256"]:
            raise Violation(f"{name} says that it holds version {version}, which was not committed like that")
        if mirrored.settled and mirrored.bits() != self.model.files[commit.state]:
            raise Violation(f"{name} serves bits that are not those of version {version}, which it says it holds")
