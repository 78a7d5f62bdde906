"""`acks/{receiver}.json`: what one receiver holds and has proved."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from dcr_s3.format import limits
from dcr_s3.format.document import HEX_32, Document
from dcr_s3.format.keys import RECEIVER_PATTERN

DEFAULT_LEASE_S = 7 * 86_400


class Ack(Document):
    """Overwritten by its receiver after every version it has applied and proved, and to renew its lease.

    The lease runs ``lease_s`` seconds from the moment the store received the object, by the store's clock.
    """

    MAGIC: ClassVar[str] = "dcr_s3/ack"
    magic: Literal["dcr_s3/ack"] = "dcr_s3/ack"

    run_id: str = Field(pattern=HEX_32)
    receiver: str = Field(pattern=RECEIVER_PATTERN)
    version: int = Field(ge=0, le=limits.VERSION)
    state: str = Field(pattern=HEX_32)
    proved_at: str = Field(max_length=40)
    lease_s: int = Field(DEFAULT_LEASE_S, ge=1, le=limits.LEASE_S)
