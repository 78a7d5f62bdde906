"""Which kernels run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from dcr_s3.delta import decode_block, encode_block, kernels
from dcr_s3.errors import ConfigError
from dcr_s3.format.dtypes import DTYPES

BUILT = importlib.util.find_spec("dcr_s3.delta._native") is not None


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets the environment as a new process would find it."""

    def set_choice(choice: str) -> None:
        monkeypatch.setenv("DCR_KERNELS", choice)
        kernels.active.cache_clear()

    yield set_choice
    monkeypatch.undo()
    kernels.active.cache_clear()


def test_auto_takes_the_extension_where_it_is_built(choose: Callable[[str], None]) -> None:
    choose("auto")
    assert kernels.kernel_name() == ("native" if BUILT else "reference")


def test_the_reference_can_be_forced(choose: Callable[[str], None]) -> None:
    choose("reference")
    assert kernels.kernel_name() == "reference"


def test_without_the_extension_auto_falls_back_and_native_is_an_error(
    choose: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dcr_s3.delta.native", None)
    choose("auto")
    assert kernels.kernel_name() == "reference"
    choose("native")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        kernels.active()


def test_another_choice_is_refused(choose: Callable[[str], None]) -> None:
    choose("fast")
    with pytest.raises(ConfigError, match="use auto, native or reference"):
        kernels.active()


def test_what_one_writes_the_other_reads(choose: Callable[[str], None]) -> None:
    old = np.arange(0x3000, 0x5000, dtype=np.uint16)
    new = old.copy()
    new[::50] += 1
    payloads = []
    for writer, reader in (("reference", "auto"), ("auto", "reference")):
        choose(writer)
        encoded = encode_block(DTYPES["BF16"], [old], [new], context=True)
        payloads.append(encoded.payload)
        choose(reader)
        decoded = decode_block(DTYPES["BF16"], encoded.coding, encoded.payload, len(new[::50]), [old])
        assert np.array_equal(decoded.new, new[::50])
    assert payloads[0] == payloads[1]
