"""Waiting out trouble: longer after every failure in a row."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

MOST_S = 60.0


class Patience:
    """Twice ``interval_s`` after one failure, and twice as long again after each that follows, at most a minute."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = self._delay_s = interval_s

    def after(self, error: Exception) -> float:
        """Logs a failure; seconds to wait before the next try."""
        self._delay_s = min(MOST_S, 2 * self._delay_s)
        log.warning("%s; trying again in about %.1f s", error, self._delay_s)
        return self._delay_s

    def succeeded(self) -> None:
        """The next failure is the first in a row."""
        self._delay_s = self._interval_s
