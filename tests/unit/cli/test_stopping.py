"""Signals end a command through its clean-up, or let it finish the work in hand."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from dcr_s3.cli.stopping import Stopped, check_stopped, stop_by_event, stop_by_exception


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_raises(number: int, code: int) -> None:
    stop_by_exception()
    with pytest.raises(Stopped) as stopped:
        signal.raise_signal(number)
    assert stopped.value.exit_code == code


def test_an_exception_that_was_swallowed_is_raised_again_where_it_is_asked_for() -> None:
    stop_by_exception()
    check_stopped()
    with suppress(BaseException):  # as libraries do
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(Stopped):
        check_stopped()


def test_the_first_signal_lets_the_work_finish_and_then_ends_it() -> None:
    finished = False
    with pytest.raises(Stopped) as stopped, stop_by_event() as stop:
        signal.raise_signal(signal.SIGTERM)
        finished = stop.is_set()
    assert finished
    assert stopped.value.exit_code == 143


def test_the_second_signal_does_not_wait() -> None:
    reached = []
    with pytest.raises(Stopped) as stopped, stop_by_event():
        signal.raise_signal(signal.SIGTERM)
        reached.append("after the first")
        signal.raise_signal(signal.SIGINT)
        reached.append("after the second")
    assert reached == ["after the first"]
    assert stopped.value.exit_code == 130


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_by_event():
        pass
    assert signal.getsignal(signal.SIGTERM) is before
