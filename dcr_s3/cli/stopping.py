"""Ctrl-C and SIGTERM: by default they end a command through its clean-up; a command that runs on may ask to be told."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_raised: list[int] = []


class Stopped(BaseException):
    """A signal asked the process to end. ``exit_code`` is 128 plus its number: 130 or 143."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def _raise(number: int, frame: FrameType | None) -> None:
    _raised.append(number)
    raise Stopped(number)


def stop_by_exception() -> None:
    """From now on both signals raise :class:`Stopped` in the main thread."""
    _raised.clear()
    for number in _SIGNALS:
        signal.signal(number, _raise)


def check_stopped() -> None:
    """Raises :class:`Stopped` again if it was raised: libraries may swallow an exception that comes out of nowhere."""
    if _raised:
        raise Stopped(_raised[-1])


@contextmanager
def stop_by_event() -> Iterator[threading.Event]:
    """Inside, the first signal sets the event, so that the work in hand is finished; a second one ends it.

    Leaving the block after a signal raises :class:`Stopped`.
    """
    stop = threading.Event()
    received: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise Stopped(number)
        received.append(number)
        stop.set()

    before = [signal.signal(number, ask) for number in _SIGNALS]
    try:
        yield stop
    finally:
        for number, handler in zip(_SIGNALS, before, strict=True):
            signal.signal(number, handler)
    if received:
        raise Stopped(received[0])
