"""How the S3 clients, blocking and asynchronous, are set up.

Bodies are not signed (the checksum header that goes with each is), so they are read once less and never copied. Where
awscrt is installed botocore signs through it and copies every body: set BOTO_DISABLE_CRT=true to avoid that.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config

from dcr_s3.store.address import S3Address
from dcr_s3.store.s3_errors import translated

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

CONNECTIONS = 64
_AWS_DOMAINS = ("amazonaws.com", "amazonaws.com.cn", "amazonaws.eu", "api.aws")


def session_arguments(address: S3Address) -> dict[str, Any]:
    """Arguments of ``boto3.Session`` and ``aioboto3.Session``."""
    return {
        "profile_name": address.profile,
        "region_name": address.region,
        "aws_access_key_id": address.access_key,
        "aws_secret_access_key": address.secret_key,
    }


def config_arguments(addressing: str) -> dict[str, Any]:
    """Arguments of ``botocore.config.Config`` and ``aiobotocore.config.AioConfig``."""
    return {
        "s3": {"addressing_style": addressing, "payload_signing_enabled": False},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "max_pool_connections": CONNECTIONS,
        "tcp_keepalive": True,
        "connect_timeout": 10,
        "read_timeout": 60,
        "retries": {"mode": "standard", "total_max_attempts": 6},
    }


def connect(address: S3Address) -> tuple[S3Client, str]:
    """A client and the addressing style it uses. ``auto`` means path style at any endpoint that is not AWS's own, since
    few of them have a DNS name for each bucket. Raises ConfigError."""
    with translated(f"connect to {address.url}", address.endpoint_url or ""):
        session = boto3.Session(**session_arguments(address))
        make = functools.partial(session.client, "s3", endpoint_url=address.endpoint_url)
        style = address.addressing
        if style == "auto" and address.endpoint_url and not is_aws(address.endpoint_url):
            style = "path"
        client = make(config=Config(**config_arguments(style)))
        if style == "auto" and not is_aws(client.meta.endpoint_url):
            # Only the client knows what the environment and the profile say of the endpoint.
            client.close()
            style = "path"
            client = make(config=Config(**config_arguments(style)))
        client.meta.events.register("before-sign.s3.DeleteObjects", _add_content_md5)
        return client, style


def _add_content_md5(request: Any, **_: object) -> None:
    """Servers that do not know the newer checksums insist on this one where several objects are deleted."""
    digest = hashlib.md5(request.data, usedforsecurity=False).digest()
    request.headers["Content-MD5"] = base64.b64encode(digest).decode()


def is_aws(endpoint_url: str) -> bool:
    """Whether an endpoint belongs to AWS."""
    host = urlsplit(endpoint_url).hostname or ""
    return host.endswith(tuple(f".{domain}" for domain in _AWS_DOMAINS))
