"""Where work runs, and how much of a machine it takes."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from dcr_s3.workers import step_back


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_a_thread_that_steps_back_takes_those_it_starts_along_and_no_others() -> None:
    before = niceness()

    def step_twice() -> list[int]:
        step_back()
        step_back()
        with ThreadPoolExecutor(1) as later:
            return [niceness(), later.submit(niceness).result()]

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(step_twice).result() == [max(10, before)] * 2
    assert niceness() == before
