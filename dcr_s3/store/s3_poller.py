"""Conditional reads of S3 objects on an event loop."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import aioboto3
from aiobotocore.config import AioConfig
from botocore.exceptions import ClientError

from dcr_s3.store.address import S3Address
from dcr_s3.store.base import Object
from dcr_s3.store.s3 import is_not_modified, read_arguments, require_size
from dcr_s3.store.s3_client import config_arguments, session_arguments
from dcr_s3.store.s3_errors import DamagedInTransit, again_if_damaged, translated

if TYPE_CHECKING:
    from types_aiobotocore_s3.client import S3Client


class S3Poller:
    """A :class:`~dcr_s3.store.base.Poller` over aioboto3, with one client that lives until ``close``. It belongs to the
    event loop of its first ``get``."""

    def __init__(self, address: S3Address, addressing: str) -> None:
        self._address = address
        self._prefix = f"{address.prefix}/" if address.prefix else ""
        self._config = AioConfig(**config_arguments(addressing))
        self._opening = asyncio.Lock()
        self._resources = AsyncExitStack()
        self._client: S3Client | None = None

    async def _connected(self) -> S3Client:
        async with self._opening:
            if self._client is None:
                session = aioboto3.Session(**session_arguments(self._address))
                opened = session.client("s3", endpoint_url=self._address.endpoint_url, config=self._config)
                self._client = await self._resources.enter_async_context(opened)
        return self._client

    @again_if_damaged
    async def get(self, key: str, *, limit_bytes: int, if_none_match: str | None = None) -> Object | None:
        url = self._address.url
        what = f"read {url}/{key}"
        with translated(what, self._address.endpoint_url or url):
            client = await self._connected()
            endpoint = client.meta.endpoint_url
        with translated(what, endpoint):
            try:
                arguments = read_arguments(self._prefix + key, if_none_match)
                reply = await client.get_object(Bucket=self._address.bucket, **arguments)
            except ClientError as error:
                if is_not_modified(error):
                    return None
                raise
            async with reply["Body"] as stream:
                require_size(url, key, reply["ContentLength"], limit_bytes)
                try:
                    body = await stream.read()
                except TimeoutError as error:
                    raise DamagedInTransit(
                        f"could not {what}: the reply from {endpoint} stopped several times; try again later"
                    ) from error
        if len(body) != reply["ContentLength"]:
            raise DamagedInTransit(
                f"could not {what}: the reply from {endpoint} ended at byte {len(body)} several times; try again later"
            )
        return Object(body, reply["ETag"])

    async def close(self) -> None:
        await self._resources.aclose()
        self._client = None
