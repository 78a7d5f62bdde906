"""The store contract as the doctor runs it on a bucket that is really used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from dcr_s3.store import Store
from dcr_s3.store.s3 import S3Store
from dcr_s3.testing.store_contract import StoreContract


class BucketContract(StoreContract):
    """For S3 stores damage on the way is tried for real; others have nothing that travels."""

    @contextlib.contextmanager
    def damaged_uploads(self, store: Store) -> Iterator[None]:
        if not isinstance(store, S3Store):
            pytest.skip("nothing travels")
        events = store.client.meta.events
        events.register("before-send.s3", _flip_a_bit)
        try:
            yield
        finally:
            events.unregister("before-send.s3", _flip_a_bit)


def _flip_a_bit(request: Any, **_: object) -> None:
    if request.body:
        changed = bytearray(request.body)
        changed[len(changed) // 2] ^= 1
        request.body = changed
