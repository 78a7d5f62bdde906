"""After failures in a row the wait doubles, to a minute at most; a success begins anew."""

from __future__ import annotations

import pytest

from dcr_s3.patience import Patience


def test_waits_double_until_something_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    patience = Patience(2.0)
    assert [patience.after(OSError("no route")) for _ in range(6)] == [4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert {patience.after(OSError("no route")) for _ in range(2000)} == {60.0}  # a store that is away for a day
    patience.succeeded()
    assert patience.after(OSError("no route")) == 4.0
    assert caplog.messages[0] == "no route; trying again in about 4.0 s"
