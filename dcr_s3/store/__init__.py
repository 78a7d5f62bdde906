"""Stores: a bucket and a prefix in it, by URL."""

from __future__ import annotations

from dcr_s3.format.signature import Signer, Verifier
from dcr_s3.store.address import MemoryAddress, parse_address
from dcr_s3.store.base import AbandonedUpload, MultipartUpload, Object, ObjectInfo, Poller, Store
from dcr_s3.store.memory import MemoryStore, shared_bucket
from dcr_s3.store.poller import open_poller
from dcr_s3.store.trusted import signer_from_environment, trusted, verifier_from_environment

__all__ = [
    "AbandonedUpload",
    "MultipartUpload",
    "Object",
    "ObjectInfo",
    "Poller",
    "Store",
    "open_poller",
    "open_store",
]


def open_store(url: str | Store, *, signer: Signer | None = None, verifier: Verifier | None = None) -> Store:
    """The store at ``s3://bucket/prefix`` or ``memory://name/prefix``.

    An S3 store is configured the ordinary AWS way (profile, environment, role, AWS_ENDPOINT_URL, region); the URL may
    add ``?endpoint_url=..&region=..&profile=..&addressing=auto|path|virtual&checksum=crc32c|off``. No request is sent
    yet. A store that is given instead is used as it is.

    Documents are signed with ``signer`` and believed only if ``verifier`` knows their signature; for an address the
    defaults are the keys in the files that DCR_SIGN_KEY_FILE and DCR_TRUST_KEY_FILES name.

    Raises BadInput for a malformed URL or key file and ConfigError for settings that cannot work.
    """
    if isinstance(url, str):
        return trusted(_open(url), signer or signer_from_environment(), verifier or verifier_from_environment())
    return trusted(url, signer, verifier)


def _open(url: str) -> Store:
    address = parse_address(url)
    if isinstance(address, MemoryAddress):
        return MemoryStore(shared_bucket(address.name), prefix=address.prefix, url=address.url)
    # botocore takes a while to import, which a process that uses no S3 need not wait for.
    from dcr_s3.store.s3 import S3Store

    return S3Store(address)
