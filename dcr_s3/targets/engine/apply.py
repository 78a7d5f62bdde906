"""The pause: gate closed, cells written, caches reset, gate open; or everything as it was."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, Protocol

from dcr_s3.errors import ApplyExpired, ReplicaUnfit, StateMismatch
from dcr_s3.targets.engine.bound import BoundEngine, Update
from dcr_s3.world import world

log = logging.getLogger(__name__)

Verify = Literal["off", "written", "full"]
"""What is read back before requests run again: nothing, what was written, or all that the engine holds."""


class Gate(Protocol):
    """Keeps requests out while weights change."""

    def close(self) -> None:
        """Returns when no computation uses the weights any more, and none will before :meth:`open`."""

    def open(self) -> None:
        """Lets requests run again."""

    def reset_caches(self) -> None:
        """Drops whatever was computed with the old weights, such as cached prefixes. Called while closed."""


class NoGate:
    """For a module that its owner does not use during an update."""

    def close(self) -> None:
        """Nothing to keep out."""

    def open(self) -> None:
        """Nothing to let in."""

    def reset_caches(self) -> None:
        """No caches."""


class Applier:
    """Applies staged updates to one engine, each in one pause of at most ``limit_s`` seconds.

    A pause ends in one of three ways: the update is in place; or everything was put back and the gate is open; or that
    failed too, and the gate stays closed: ``unfit`` then says why, and every later call raises ``ReplicaUnfit``.
    """

    def __init__(self, bound: BoundEngine, gate: Gate, *, limit_s: float) -> None:
        self.bound = bound
        self.gate = gate
        self.limit_s = limit_s
        self.unfit = ""
        self.pause_s = 0.0
        """Length of the last pause."""

    def apply(
        self, updates: list[Update], prove: Callable[[], None], prove_old: Callable[[], None] = lambda: None
    ) -> None:
        """Writes updates in order; ``prove`` checks the result while the gate is still closed. Where it fails, writes
        did not do what they should, so ``prove_old`` checks what undoing them left.

        Raises ``ApplyExpired`` if the pause took too long, ``ReplicaUnfit``, and what ``prove`` or the loader raise.
        """
        self.check_fit()
        self.bound.check_in_place()
        begun = world().monotonic()

        def check() -> None:
            if world().monotonic() - begun > self.limit_s:
                raise ApplyExpired(f"the pause took longer than {self.limit_s} s; the engine was put back")

        self.gate.close()
        try:
            for update in updates:
                self.bound.write(update, check)
            if any(update.groups for update in updates):
                self.bound.check_in_place()  # the loader ran
            self.gate.reset_caches()
            prove()
            check()
        except BaseException as error:
            self._put_back(updates, error, prove_old)
            raise
        finally:
            self.pause_s = world().monotonic() - begun
        self.gate.open()
        self.pause_s = world().monotonic() - begun

    def check_fit(self) -> None:
        """Raises ``ReplicaUnfit`` if an earlier update could be neither finished nor undone."""
        if self.unfit:
            raise ReplicaUnfit(f"this replica is closed: {self.unfit}; load its engine anew")

    def _put_back(self, updates: list[Update], reason: BaseException, prove_old: Callable[[], None]) -> None:
        try:
            for update in reversed(updates):
                self.bound.undo(update)
            self.bound.check_in_place()
            if isinstance(reason, StateMismatch):
                prove_old()
            self.gate.reset_caches()
        except BaseException as error:
            self.unfit = f"an update failed ({reason}), and so did putting the engine back ({error})"
            log.critical("%s", self.unfit)
            raise ReplicaUnfit(f"{self.unfit}; the gate stays closed, load the engine anew") from reason
        self.gate.open()
