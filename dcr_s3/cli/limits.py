"""For runs from cron: an end after some time, and a start that is spread out."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dcr_s3.errors import RetryError
from dcr_s3.world import world

GRACE_S = 30.0


class TimedOut(RetryError):
    """The command did not end within ``--timeout``; what it finished stays, and the next run goes on from there."""


class _Alarm(BaseException):
    """Goes through code that catches every exception to try again, as S3 clients do."""


@contextmanager
def time_limit(timeout_s: float | None, grace_s: float = GRACE_S) -> Iterator[None]:
    """Raises :class:`TimedOut` in the main thread after ``timeout_s`` and, where the clean-up itself hangs, ends the
    process ``grace_s`` later: a mirror survives that anywhere."""
    if timeout_s is None:
        yield
        return
    rung = False

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal rung
        if rung:
            print(f"TimedOut: still not over {grace_s:g} s after --timeout; ended", file=sys.stderr, flush=True)
            os._exit(TimedOut.exit_code)
        rung = True
        raise _Alarm

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, timeout_s, grace_s)
    try:
        yield
    except _Alarm:
        raise TimedOut(
            f"not over after {timeout_s:g} s; what was finished stays, and the next run goes on from there"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def spread(jitter_s: float) -> None:
    """Waits a random time up to ``jitter_s``, so that a fleet's cron jobs do not ask the store all at once."""
    if jitter_s:
        world().sleep(world().uniform(0, jitter_s))
