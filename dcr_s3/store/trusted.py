"""A store that signs every document it writes, and believes none that is not signed by a trusted key."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from dcr_s3.errors import BadInput
from dcr_s3.format.keys import is_signed
from dcr_s3.format.signature import Signer, Verifier, read_key, read_signer, signed
from dcr_s3.store.base import Object, Poller, Store
from dcr_s3.store.poller import open_poller
from dcr_s3.store.wrapped import Request, WrappedStore

R = TypeVar("R")

SIGN_KEY = "DCR_SIGN_KEY_FILE"
TRUST_KEYS = "DCR_TRUST_KEY_FILES"


class TrustedStore(WrappedStore):
    """Signs with ``signer`` what has no signature yet; with ``verifier`` an unsigned or altered document raises
    ``BadSignature`` as it is read. Acknowledgements are not covered: receivers need no key to sign.
    """

    def __init__(self, inner: Store, signer: Signer | None, verifier: Verifier | None) -> None:
        super().__init__(inner)
        self._signer = signer
        self._verifier = verifier

    def around(self, request: Request, send: Callable[[Request], R]) -> R:
        if request.kind == "put" and request.body is not None and is_signed(request.key):
            request = replace(request, body=bytearray(self.signed(request.body)))
        result = send(request)
        if request.kind == "get" and isinstance(result, Object):
            self.check(request.key, result)
        return result

    def signed(self, body: bytes | bytearray) -> bytes:
        """A document's bytes as this store writes them."""
        return signed(body, self._signer)

    def check(self, key: str, found: Object) -> None:
        """Raises ``BadSignature`` for a document that is not signed by a trusted key."""
        if self._verifier is not None and is_signed(key):
            self._verifier.check(found.body, where=f"{self.url}/{key}")

    def open_poller(self) -> Poller:
        """See :func:`dcr_s3.store.open_poller`."""
        return TrustedPoller(open_poller(self.inner), self)


class TrustedPoller:
    """A :class:`~dcr_s3.store.base.Poller` that believes what its store believes."""

    def __init__(self, inner: Poller, store: TrustedStore) -> None:
        self._inner = inner
        self._store = store

    async def get(self, key: str, *, limit_bytes: int, if_none_match: str | None = None) -> Object | None:
        found = await self._inner.get(key, limit_bytes=limit_bytes, if_none_match=if_none_match)
        if found is not None:
            self._store.check(key, found)
        return found

    async def close(self) -> None:
        await self._inner.close()


def as_stored(store: Store, body: bytes) -> bytes:
    """The bytes that a signed kind of document will have in the store."""
    while isinstance(store, WrappedStore):
        if isinstance(store, TrustedStore):
            body = store.signed(body)
        store = store.inner
    return body


def trusted(store: Store, signer: Signer | None = None, verifier: Verifier | None = None) -> Store:
    """The store with these keys; a signer trusts itself where nothing else is trusted. Without keys the store as it
    is.
    """
    if signer is not None and verifier is None:
        verifier = Verifier([signer.verifier()])
    return TrustedStore(store, signer, verifier) if signer is not None or verifier is not None else store


def signer_from_environment() -> Signer | None:
    """The key in the file that ``DCR_SIGN_KEY_FILE`` names. Raises ``BadInput``."""
    path = os.environ.get(SIGN_KEY)
    return read_signer(_read(path, SIGN_KEY), where=path) if path else None


def verifier_from_environment() -> Verifier | None:
    """The keys in the files that ``DCR_TRUST_KEY_FILES`` names, separated like ``PATH``. Raises ``BadInput``."""
    paths = [p for p in os.environ.get(TRUST_KEYS, "").split(os.pathsep) if p]
    return Verifier(read_key(_read(p, TRUST_KEYS), where=p) for p in paths) if paths else None


def _read(path: str, name: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadInput(f"{name} names {path}, which cannot be read: {error.strerror}") from None
