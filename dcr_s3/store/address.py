"""Where a store is: URLs, and the settings that the environment may give."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal, cast
from urllib.parse import SplitResult, parse_qsl, urlsplit

from dcr_s3.errors import BadInput

Addressing = Literal["auto", "path", "virtual"]
Checksum = Literal["crc32c", "off"]

_PARAMETERS = ("endpoint_url", "region", "profile", "addressing", "checksum")
_EXAMPLE = "write it like s3://bucket/run or memory://name"
_NO_SECRETS = (
    "credentials do not belong in a URL, which ends up in logs: give them through a profile (?profile=NAME), "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the machine's role"
)


@dataclass(frozen=True)
class S3Address:
    """A bucket, a prefix in it, and how to reach it. What is None comes from the usual AWS settings (environment,
    profile, role). ``access_key`` and ``secret_key`` are for programs that start a server themselves, never in a URL.
    """

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    addressing: Addressing = "auto"
    checksum: Checksum = "crc32c"
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """Bucket and prefix, for people."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


@dataclass(frozen=True)
class MemoryAddress:
    """A store of this process by name, and a prefix in it."""

    name: str
    prefix: str = ""

    @property
    def url(self) -> str:
        """Name and prefix, for people."""
        return f"memory://{self.name}/{self.prefix}".rstrip("/")


def parse_address(url: str) -> S3Address | MemoryAddress:
    """Reads ``s3://bucket/prefix?endpoint_url=..&region=..&profile=..&addressing=path|virtual|auto&checksum=crc32c|off``
    or ``memory://name/prefix``. DCR_S3_ADDRESSING and DCR_S3_CHECKSUM stand in for the last two. Raises BadInput."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise BadInput(f"not a store URL ({error}): {_EXAMPLE}") from None
    if "@" in parts.netloc:
        raise BadInput(_NO_SECRETS)
    if parts.scheme not in ("s3", "memory"):
        raise BadInput(f"{_shown(parts)} is not the URL of a store: {_EXAMPLE}")
    if not parts.netloc:
        raise BadInput(f"{_shown(parts)} names no bucket: {_EXAMPLE}")
    if parts.fragment:
        raise BadInput(f"{_shown(parts)} must not contain '#'")
    prefix = _prefix(parts)
    if parts.scheme == "memory":
        if parts.query:
            raise BadInput(f"{_shown(parts)} takes no parameters")
        return MemoryAddress(parts.netloc, prefix)
    given = _parameters(parts)
    return S3Address(
        bucket=parts.netloc,
        prefix=prefix,
        endpoint_url=_endpoint(given.get("endpoint_url")),
        region=given.get("region"),
        profile=given.get("profile"),
        addressing=cast(Addressing, _choice(given, "addressing", ("auto", "path", "virtual"))),
        checksum=cast(Checksum, _choice(given, "checksum", ("crc32c", "off"))),
    )


def _shown(parts: SplitResult) -> str:
    """The URL for a message, without its query: what is there by mistake may be secret."""
    return parts._replace(query="", fragment="").geturl() or "an empty address"


def _prefix(parts: SplitResult) -> str:
    prefix = parts.path.strip("/")
    if any(step in ("", ".", "..") for step in prefix.split("/")) and prefix:
        raise BadInput(f"{_shown(parts)} has an empty, '.' or '..' step in its path")
    return prefix


def _parameters(parts: SplitResult) -> dict[str, str]:
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name, value in given.items():
        if name not in _PARAMETERS:
            hint = _NO_SECRETS if "key" in name.lower() or "secret" in name.lower() or "token" in name.lower() else ""
            raise BadInput(f"unknown parameter {name} in the URL; known are {', '.join(_PARAMETERS)}. {hint}".rstrip())
        if not value:
            raise BadInput(f"parameter {name} in the URL is empty")
    return given


def _endpoint(endpoint_url: str | None) -> str | None:
    if endpoint_url is None:
        return None
    parts = urlsplit(endpoint_url)
    if "@" in parts.netloc:
        raise BadInput(_NO_SECRETS)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadInput("endpoint_url must be like https://storage.example.org or http://127.0.0.1:9000")
    return endpoint_url


def _choice(given: dict[str, str], name: str, allowed: tuple[str, ...]) -> str:
    variable = f"DCR_S3_{name.upper()}"
    value = given.get(name) or os.environ.get(variable) or allowed[0]
    if value not in allowed:
        raise BadInput(f"{name} (or {variable}) must be one of {', '.join(allowed)}, not {value}")
    return value
