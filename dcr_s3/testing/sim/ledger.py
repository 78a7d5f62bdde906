"""What the bucket says, read without the package's help: documents and the objects that they name."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from dcr_s3.format.keys import (
    fold_segment_key,
    fold_versions,
    manifest_version,
    segment_key,
    snapshot_key,
    snapshot_version,
)
from dcr_s3.testing.sim.simulation import Violation


@dataclass(frozen=True)
class Named:
    """An object that a document names."""

    key: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Claim:
    """A document that says: with these objects you get from version ``first`` (-1: from nothing) to ``last``."""

    kind: str
    key: str
    first: int
    last: int
    objects: tuple[Named, ...]
    document: Mapping[str, Any]


def read_claim(key: str, body: bytes) -> Claim | None:
    """The claim under a key, None for other objects."""
    if (version := manifest_version(key)) is not None:
        document = json.loads(body)
        segments = _segments(document, lambda *place: segment_key(version, *place))
        return Claim("delta", key, version - 1, version, tuple(segments), document)
    if (ends := fold_versions(key)) is not None:
        document = json.loads(body)
        segments = _segments(document, lambda *place: fold_segment_key(*ends, *place))
        return Claim("fold", key, *ends, tuple(segments), document)
    if (version := snapshot_version(key)) is not None:
        document = json.loads(body)
        files = document["files"]
        named = (
            Named(snapshot_key(version, document["folder"], f["name"]), f["size_bytes"], f["sha256"]) for f in files
        )
        return Claim("snapshot", key, -1, version, tuple(named), document)
    return None


def _segments(document: Mapping[str, Any], key: Any) -> Iterator[Named]:
    for entry in document.get("segments", ()):
        yield Named(key(document["attempt"], entry["owner"], entry["seq"]), entry["size_bytes"], entry["sha256"])


class Ledger:
    """All claims, and whether what they name is there."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.claims: dict[str, Claim] = {}
        self._named: set[str] = set()

    def update(self, objects: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Takes note of what the bucket holds now; returns new and deleted keys.

        Raises ``Violation`` if a document, or an object that one names, was overwritten, or if a new document names
        what is not complete.
        """
        before, self.objects = self.objects, dict(objects)
        gone = sorted(before.keys() - objects.keys())
        fresh = sorted(key for key, stored in objects.items() if before.get(key) is not stored)
        for key in fresh:
            claim = read_claim(key, objects[key].body)
            if key in before and before[key].body != objects[key].body and (claim is not None or key in self._named):
                raise Violation(f"{key} was overwritten, though others rely on it")
            if claim is not None and key not in before:
                self._require_complete(claim)
                self.claims[key] = claim
                self._named |= {n.key for n in claim.objects}
        for key in gone:
            if key in self.claims and self.claims[key].kind != "delta":
                del self.claims[key]
        return [key for key in fresh if key not in before], gone

    def require_whole(self) -> None:
        """Raises ``Violation`` where a fold's or snapshot's document is visible, but not all of its objects."""
        for claim in self.claims.values():
            if claim.kind != "delta" and not self._is_there(claim):
                raise Violation(f"{claim.key} is visible, but not all objects that it names")

    def reaches(self, start: int, newest: int) -> bool:
        """True if some way leads from a version (-1: from nothing) to the newest."""
        edges = [(c.first, c.last) for c in self.claims.values() if self._is_there(c)]
        reached, ahead = {start, -1}, [start, -1]
        while ahead:
            at = ahead.pop()
            for first, last in edges:
                if first == at and last not in reached:
                    reached.add(last)
                    ahead.append(last)
        return newest in reached

    @property
    def kinds(self) -> Collection[str]:
        """Kinds of the claims there are."""
        return {c.kind for c in self.claims.values()}

    def _is_there(self, claim: Claim) -> bool:
        return all(n.key in self.objects for n in claim.objects)

    def _require_complete(self, claim: Claim) -> None:
        for named in claim.objects:
            stored = self.objects.get(named.key)
            if stored is None or len(stored.body) != named.size_bytes or _sha(stored.body) != named.sha256:
                raise Violation(f"{claim.key} is visible, but {named.key}, which it names, is not complete")


def _sha(body: bytes) -> str:
    return sha256(body).hexdigest()
