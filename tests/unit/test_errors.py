"""Exit codes are a promise to scripts: one per group of the error tree."""

from __future__ import annotations

import pytest

from dcr_s3 import errors

EXIT_CODES = {errors.RetryError: 10, errors.ResyncError: 11, errors.ConfigError: 12, errors.IntegrityError: 13}


@pytest.mark.parametrize(
    "error",
    [
        e
        for e in vars(errors).values()
        if isinstance(e, type) and issubclass(e, errors.DcrError) and e is not errors.DcrError
    ],
)
def test_every_error_has_the_exit_code_of_its_group(error: type[errors.DcrError]) -> None:
    group = next(g for g in EXIT_CODES if issubclass(error, g))
    assert error.exit_code == EXIT_CODES[group]
    assert f"{error.__name__} " in (errors.__doc__ or "")
