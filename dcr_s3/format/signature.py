"""Signatures of documents: who wrote them, with a shared secret (HMAC-SHA256) or Ed25519.

A signature is the last member before the seal, so that what is signed is exactly the bytes before it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from dcr_s3.errors import BadInput, BadSignature, ConfigError
from dcr_s3.format.document import SEAL_BYTES, seal

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

MIN_SECRET_BYTES = 32

_CONTEXT = b"dcr_s3 document 1\n"
_MEMBER = re.compile(rb',"~signature":"([a-z0-9-]{1,32}):([0-9a-f]{16}):([0-9a-f]{64,256})"')
_MEMBER_BYTES = 400


class Signer(Protocol):
    """A key that signs. ``key_id`` is 16 hex digits that say which, and nothing about the key."""

    scheme: str
    key_id: str

    def sign(self, message: bytes) -> bytes:
        """Signature of ``message``: the same key and message always give the same one."""

    def verifier(self) -> Key:
        """What others need to check it."""


class Key(Protocol):
    """A key that checks."""

    scheme: str
    key_id: str

    def matches(self, message: bytes, signature: bytes) -> bool:
        """True if the signature is this key's, of this message."""


class SharedSecret:
    """HMAC-SHA256: whoever can check can also sign. The secret never appears in messages or logs."""

    scheme = "hmac-sha256"

    def __init__(self, secret: bytes) -> None:
        if len(secret) < MIN_SECRET_BYTES:
            raise BadInput(f"a shared secret needs {MIN_SECRET_BYTES} bytes or more, this one has {len(secret)}")
        self._secret = secret
        self.key_id = self.sign(b"key id")[:8].hex()

    def sign(self, message: bytes) -> bytes:
        return hmac.digest(self._secret, message, "sha256")

    def matches(self, message: bytes, signature: bytes) -> bool:
        return hmac.compare_digest(self.sign(message), signature)

    def verifier(self) -> Key:
        return self


class Ed25519Signer:
    """A private key of 32 bytes, which only the sender (and whoever folds or makes snapshots) needs to have."""

    scheme = "ed25519"

    def __init__(self, private: bytes) -> None:
        self._private: Ed25519PrivateKey = _library().Ed25519PrivateKey.from_private_bytes(private)
        self._verifier = Ed25519Verifier(self._private.public_key().public_bytes_raw())
        self.key_id = self._verifier.key_id

    def sign(self, message: bytes) -> bytes:
        return self._private.sign(message)

    def verifier(self) -> Key:
        return self._verifier


class Ed25519Verifier:
    """A public key of 32 bytes."""

    scheme = "ed25519"

    def __init__(self, public: bytes) -> None:
        self._public: Ed25519PublicKey = _library().Ed25519PublicKey.from_public_bytes(public)
        self.key_id = hashlib.sha256(public).hexdigest()[:16]

    def matches(self, message: bytes, signature: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature

        try:
            self._public.verify(signature, message)
        except InvalidSignature:
            return False
        return True


class Verifier:
    """The keys that are trusted; several, so that a new one can come before the old one goes."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = {(k.scheme, k.key_id): k for k in keys}
        if not self._keys:
            raise BadInput("no key is trusted, so that nothing could be read; give one")

    def check(self, body: bytes, *, where: str) -> None:
        """Raises ``BadSignature`` unless a document is signed by a trusted key. ``where`` names it."""
        content, found = split_signature(body)
        if found is None:
            raise BadSignature(f"{where}: is not signed, but signatures are required here")
        scheme, key_id, signature = found
        key = self._keys.get((scheme, key_id))
        if key is None:
            known = ", ".join(f"{s}:{i}" for s, i in sorted(self._keys))
            raise BadSignature(f"{where}: is signed with key {scheme}:{key_id}, which is not trusted here ({known} is)")
        if not key.matches(_CONTEXT + content, signature):
            raise BadSignature(f"{where}: its signature by {scheme}:{key_id} does not hold; somebody altered it")


def signed(body: bytes | bytearray, signer: Signer | None) -> bytes:
    """A document's bytes with a signature; unchanged if there is no signer or a signature is there already."""
    content, found = split_signature(body)
    if signer is None or found is not None:
        return bytes(body)
    text = f"{signer.scheme}:{signer.key_id}:{signer.sign(_CONTEXT + content).hex()}"
    content += b',"~signature":"' + text.encode() + b'"'
    return content + seal(content)


def split_signature(body: bytes | bytearray) -> tuple[bytes, tuple[str, str, bytes] | None]:
    """What is or would be signed, and the signature as (scheme, key id, bytes), None if there is none."""
    content = bytes(body[:-SEAL_BYTES])
    start = content.rfind(b',"~signature":"', max(0, len(content) - _MEMBER_BYTES))
    match = _MEMBER.fullmatch(content, start) if start >= 0 else None
    if match is None:
        return content, None
    scheme, key_id, signature = match.groups()
    if len(signature) % 2:
        return content, None
    return content[:start], (scheme.decode(), key_id.decode(), bytes.fromhex(signature.decode()))


def read_signer(material: bytes, *, where: str) -> Signer:
    """A signing key from a file's content: an Ed25519 private key in PEM, else a shared secret.

    Raises ``BadInput``, never showing the content. ``where`` names the file.
    """
    if not material.startswith(b"-----BEGIN"):
        return SharedSecret(material.strip())
    try:
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        key = load_pem_private_key(material, None)
    except ImportError:
        raise _missing_library() from None
    except (ValueError, TypeError):
        raise BadInput(f"{where}: is no unencrypted private key in PEM") from None
    if not isinstance(key, _library().Ed25519PrivateKey):
        raise BadInput(f"{where}: is no Ed25519 key; make one with `openssl genpkey -algorithm ed25519`")
    return Ed25519Signer(key.private_bytes_raw())


def read_key(material: bytes, *, where: str) -> Key:
    """A key to trust from a file's content: an Ed25519 public key in PEM, else a shared secret. Raises ``BadInput``."""
    if not material.startswith(b"-----BEGIN"):
        return SharedSecret(material.strip())
    if b"PRIVATE KEY" in material.splitlines()[0]:
        return read_signer(material, where=where).verifier()
    try:
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        key = load_pem_public_key(material)
    except ImportError:
        raise _missing_library() from None
    except (ValueError, TypeError):
        raise BadInput(f"{where}: is no public key in PEM") from None
    if not isinstance(key, _library().Ed25519PublicKey):
        raise BadInput(f"{where}: is no Ed25519 key; make one with `openssl pkey -pubout`")
    return Ed25519Verifier(key.public_bytes_raw())


def _library() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise _missing_library() from None
    return ed25519


def _missing_library() -> ConfigError:
    return ConfigError("Ed25519 signatures need the cryptography package: pip install 'dcr-s3[signing]'")
