"""Where work runs: a thread pool, or the calling thread for deterministic runs."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

_BACKGROUND_NICENESS = 10

Progress = Callable[[str, int, int], None]
"""Called with (stage, done_bytes, total_bytes), perhaps from several threads."""


def no_progress(stage: str, done_bytes: int, total_bytes: int) -> None:
    """For those who do not want to know."""


class InlineExecutor(Executor):
    """Runs every task at once in the calling thread."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


def make_executor(workers: int | None, name: str) -> Executor:
    """``workers`` threads; None: one per usable core, at most 16; 0: no thread at all."""
    if workers == 0:
        return InlineExecutor()
    count = workers if workers is not None else min(16, len(os.sched_getaffinity(0)))
    return ThreadPoolExecutor(count, thread_name_prefix=f"dcr-{name}")


def step_back() -> None:
    """Lets other threads of this machine go first: the calling thread, and those it starts from now on, get about a
    tenth of a core that others want too. Cores that nobody else wants are used as before.
    """
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, max(_BACKGROUND_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def bounded_map(executor: Executor, fn: Callable[[T], R], items: Iterable[T], *, ahead: int) -> Iterator[R]:
    """Results in order, with at most ``ahead`` tasks begun and not yet taken. The first error cancels the rest.

    Without threads each task runs when its result is asked for.
    """
    if isinstance(executor, InlineExecutor):
        ahead = 1
    pending: deque[Future[R]] = deque()
    try:
        for item in items:
            if len(pending) >= ahead:
                yield pending.popleft().result()
            pending.append(executor.submit(fn, item))
        while pending:
            yield pending.popleft().result()
    finally:
        abandon(pending)


def abandon(futures: Iterable[Future[Any]]) -> None:
    """Cancels what has not begun and waits for what has."""
    waiting = [f for f in futures if not f.cancel()]
    for future in waiting:
        future.exception()
