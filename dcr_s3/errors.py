"""Every error the package raises on purpose, grouped by what the caller can do next.

    DcrError
    +-- RetryError            try again later: nothing was changed, or nothing is known to have changed
    |   +-- StoreUnavailable      the store did not answer, or answered that it is overloaded
    |   +-- UnknownOutcome        a write whose reply was lost and that could not be settled by reading back
    |   +-- Busy                  another process is working on the same directory
    |   +-- ApplyExpired          an engine's pause took too long; it was put back and serves the version before
    |   +-- OwnerFailed           another rank of the trainer failed, or did not answer, while publishing
    |   +-- NotAcknowledged       a receiver has not proved the version (yet), or the version is not released (yet)
    +-- ResyncError           start from the newest verified state again
    |   +-- CommitConflict        another sender committed this version
    |   +-- Fenced                a newer sender has taken over the run
    |   +-- WrongBase             the bits held are not the bits the delta was made from
    |   +-- ChainBroken           a version that is needed is gone, or does not follow its parent
    |       +-- ObjectGone            a committed object was deleted; there may be another way
    +-- ConfigError           fix an argument, a permission or a file
    |   +-- BadInput              a tensor, checkpoint or argument that cannot be used
    |   +-- BucketMissing         no such bucket
    |   +-- Forbidden             the store refused the credentials
    |   +-- RunMissing            no run at this address
    |   +-- RunExists             the address holds another run
    |   +-- UnsupportedFormat     written by a newer major version of the format
    |   +-- DiskFull              no room for the journal or the mirror
    +-- IntegrityError        stop and look: stored bytes are not what was committed
        +-- CorruptObject         an object is truncated, altered or malformed
        +-- BadSignature          a document is not signed by a key that is trusted here
        +-- StateMismatch         a mirror's or engine's bits are not those of the version it claims
        +-- ReplicaUnfit          an engine could be neither updated nor put back; it stays closed to requests

Store-level outcomes that callers handle in the normal course (an absent object, a condition that did not hold) are
``NotFound`` and ``PreconditionFailed``; they never reach a user.
"""

from __future__ import annotations

from typing import ClassVar


class DcrError(Exception):
    """Base of all. ``exit_code`` is what the command line returns for it."""

    exit_code: ClassVar[int] = 1


class RetryError(DcrError):
    exit_code = 10


class StoreUnavailable(RetryError):
    pass


class UnknownOutcome(RetryError):
    pass


class Busy(RetryError):
    pass


class NotAcknowledged(RetryError):
    pass


class OwnerFailed(RetryError):
    pass


class ApplyExpired(RetryError):
    pass


class ResyncError(DcrError):
    exit_code = 11


class CommitConflict(ResyncError):
    pass


class Fenced(ResyncError):
    pass


class WrongBase(ResyncError):
    pass


class ChainBroken(ResyncError):
    pass


class ObjectGone(ChainBroken):
    pass


class ConfigError(DcrError):
    exit_code = 12


class BadInput(ConfigError, ValueError):
    pass


class BucketMissing(ConfigError):
    pass


class Forbidden(ConfigError):
    pass


class RunMissing(ConfigError):
    pass


class RunExists(ConfigError):
    pass


class UnsupportedFormat(ConfigError):
    pass


class DiskFull(ConfigError):
    pass


class IntegrityError(DcrError):
    exit_code = 13


class CorruptObject(IntegrityError):
    pass


class BadSignature(IntegrityError):
    pass


class StateMismatch(IntegrityError):
    pass


class ReplicaUnfit(IntegrityError):
    pass


class StoreOutcome(Exception):
    """Base of the two outcomes below."""


class NotFound(StoreOutcome):
    """The key holds no object."""


class PreconditionFailed(StoreOutcome):
    """A conditional write did not apply: the key exists, is missing, changed, or another writer was faster."""
