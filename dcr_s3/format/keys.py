"""Names of the objects of a run, relative to its prefix. Keys are built here and never read from a bucket."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

RUN_KEY = "run.json"
RELEASE_KEY = "release.json"
MANIFEST_PREFIX = "manifests/"
ACK_PREFIX = "acks/"
SEGMENT_PREFIX = "segments/"
OWNER_PREFIX = "owners/"
SNAPSHOT_PREFIX = "snapshots/"
FOLD_PREFIX = "folds/"
SNAPSHOT_MARKER = "dcr_snapshot.json"

ATTEMPT_PATTERN = r"^[0-9]{6}-[0-9a-f]{12}-[0-9]{4}$"
FOLDER_PATTERN = r"^[0-9a-f]{12}$"
RECEIVER_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
_FILE_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")
_SNAPSHOT = re.compile(rf"snapshots/([0-9]{{12}})/{SNAPSHOT_MARKER}")
_FOLD = re.compile(r"folds/([0-9]{12})-([0-9]{12})\.json")
_IN_ATTEMPT = re.compile(rf"(segments|owners)/([0-9]{{12}})/({ATTEMPT_PATTERN[1:-1]})/[^/]+")
_IN_FOLD = re.compile(rf"folds/([0-9]{{12}})-([0-9]{{12}})/({ATTEMPT_PATTERN[1:-1]})/[^/]+")
_IN_SNAPSHOT = re.compile(rf"snapshots/([0-9]{{12}})/({FOLDER_PATTERN[1:-1]})/[^/]+")
_MANIFEST = re.compile(r"manifests/([0-9]{12})\.json")


def attempt_name(epoch: int, session: str, number: int) -> str:
    """One sender's one try at a version: ``session`` is 12 random hex digits, so that no two senders share a key."""
    name = f"{epoch:06d}-{session}-{number:04d}"
    if not re.fullmatch(ATTEMPT_PATTERN, name):
        raise ValueError(f"{name!r} is no attempt name")
    return name


def manifest_key(version: int) -> str:
    """Key of a version's manifest; its creation is the commit."""
    return f"{MANIFEST_PREFIX}{version:012d}.json"


def manifest_version(key: str) -> int | None:
    """Version of a listed manifest key, None for any other key."""
    match = _MANIFEST.fullmatch(key)
    return int(match.group(1)) if match else None


def segment_key(version: int, attempt: str, owner: int, seq: int) -> str:
    """Key of one segment. Known before the version is committed, so receivers may fetch ahead."""
    return f"{SEGMENT_PREFIX}{version:012d}/{attempt}/{owner:05d}-{seq:06d}.dcr"


def owner_key(version: int, attempt: str, owner: int) -> str:
    """Key of what one rank of a trainer adds to an attempt; only several ranks together write such objects."""
    return f"{OWNER_PREFIX}{version:012d}/{attempt}/{owner:05d}.json"


def ack_key(receiver: str) -> str:
    """Key of what one receiver holds. Raises ValueError for a name that is not made of ``[A-Za-z0-9._-]``."""
    if not re.fullmatch(RECEIVER_PATTERN, receiver):
        raise ValueError(
            f"receiver name {receiver!r}: use up to 128 letters, digits, '.', '_', '-', first one alphanumeric"
        )
    return f"{ACK_PREFIX}{receiver}.json"


def ack_receiver(key: str) -> str | None:
    """Receiver of a listed acknowledgement key, None for any other key."""
    name = key.removeprefix(ACK_PREFIX).removesuffix(".json")
    named = key == f"{ACK_PREFIX}{name}.json" and re.fullmatch(RECEIVER_PATTERN, name)
    return name if named else None


def snapshot_marker_key(version: int) -> str:
    """Key of the marker that makes a full state complete."""
    return f"{SNAPSHOT_PREFIX}{version:012d}/{SNAPSHOT_MARKER}"


def snapshot_version(key: str) -> int | None:
    """Version of a listed snapshot marker, None for any other key."""
    match = _SNAPSHOT.fullmatch(key)
    return int(match.group(1)) if match else None


def snapshot_prefix(version: int, folder: str) -> str:
    """Where one writer put a full state, as an ordinary checkpoint directory. ``folder`` is 12 random hex digits."""
    if not re.fullmatch(FOLDER_PATTERN, folder):
        raise ValueError(f"{folder!r} is no folder name")
    return f"{SNAPSHOT_PREFIX}{version:012d}/{folder}/"


def snapshot_key(version: int, folder: str, file_name: str) -> str:
    """Key of one file of a snapshot. Raises ValueError for a name that is not a plain file name."""
    if not is_plain_file_name(file_name):
        raise ValueError(f"{file_name!r} is not a plain file name")
    return snapshot_prefix(version, folder) + file_name


def fold_key(first: int, last: int) -> str:
    """Key of the manifest of the fold that leads from version ``first`` to version ``last``."""
    return f"{FOLD_PREFIX}{first:012d}-{last:012d}.json"


def fold_versions(key: str) -> tuple[int, int] | None:
    """Versions of a listed fold manifest, None for any other key."""
    match = _FOLD.fullmatch(key)
    return (int(match.group(1)), int(match.group(2))) if match else None


def fold_segment_key(first: int, last: int, attempt: str, owner: int, seq: int) -> str:
    """Key of one segment of a fold."""
    return f"{FOLD_PREFIX}{first:012d}-{last:012d}/{attempt}/{owner:05d}-{seq:06d}.dcr"


def is_signed(key: str) -> bool:
    """True for documents that carry a signature where a run is signed: all but acknowledgements."""
    if key in (RUN_KEY, RELEASE_KEY) or manifest_version(key) is not None:
        return True
    if fold_versions(key) is not None or snapshot_version(key) is not None:
        return True
    place = place_of(key)
    return place is not None and place.kind == "owner"


class Place(NamedTuple):
    """What an object belongs to: the step from version ``first`` to ``last``, in one writer's ``folder``. A snapshot
    has ``first`` -1; a segment's folder, and an owner list's, is its attempt.
    """

    kind: Literal["segment", "owner", "fold", "snapshot"]
    first: int
    last: int
    folder: str


def place_of(key: str) -> Place | None:
    """Place of a listed object that lies in a writer's folder, None for any other key."""
    if match := _IN_ATTEMPT.fullmatch(key):
        version = int(match.group(2))
        return Place("segment" if match.group(1) == "segments" else "owner", version - 1, version, match.group(3))
    if match := _IN_FOLD.fullmatch(key):
        return Place("fold", int(match.group(1)), int(match.group(2)), match.group(3))
    if match := _IN_SNAPSHOT.fullmatch(key):
        return Place("snapshot", -1, int(match.group(1)), match.group(2))
    return None


def attempt_epoch(attempt: str) -> int:
    """Epoch of the sender that made an attempt."""
    return int(attempt[:6])


def is_plain_file_name(name: str) -> bool:
    """True for names that stay inside the directory they are joined to."""
    return bool(_FILE_PATTERN.fullmatch(name))
