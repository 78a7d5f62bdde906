"""What all JSON objects of a run share: kind, format version, writer; and how they are read and written."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dcr_s3.errors import CorruptObject, UnsupportedFormat
from dcr_s3.format.digest import sha256_hex

FORMAT_MAJOR = 1
FORMAT_MINOR = 0
WRITER = "dcr_s3 0.1.0"

HEX_64 = r"^[0-9a-f]{64}$"
HEX_32 = r"^[0-9a-f]{32}$"


class Part(BaseModel):
    """A piece of a document. Unknown fields are ignored: a newer minor version may add some."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class FormatVersion(Part):
    major: int = Field(FORMAT_MAJOR, ge=0)
    minor: int = Field(FORMAT_MINOR, ge=0)


class Document(Part):
    """One JSON object in the bucket."""

    magic: str
    format: FormatVersion = FormatVersion(major=FORMAT_MAJOR, minor=FORMAT_MINOR)
    writer: str = Field(WRITER, max_length=200)

    MAGIC: ClassVar[str]

    def to_bytes(self) -> bytes:
        """Compact UTF-8 JSON with sorted keys, then the seal: the same document always gives the same bytes."""
        content = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()[:-1]
        return content + seal(content)

    @classmethod
    def from_bytes(cls, body: bytes, *, where: str) -> Self:
        """Reads a document. ``where`` names the object in errors.

        Raises ``UnsupportedFormat`` for another major version, ``CorruptObject`` for anything that is not valid.
        """
        try:
            raw = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise CorruptObject(
                f"{where}: not valid JSON ({error}); the object is damaged or is no dcr_s3 object"
            ) from None
        check_header(raw, cls.MAGIC, where)
        content = body[:-SEAL_BYTES]
        if body[-SEAL_BYTES:] != seal(content):
            raise CorruptObject(f"{where}: its bytes do not have the digest it ends with; the object is damaged")
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise CorruptObject(f"{where}: {_first_problem(error)}") from None


def seal(content: bytes) -> bytes:
    """The end of every document: its last member, the SHA-256 of all bytes before it."""
    return b',"~sha256":"' + sha256_hex(content).encode() + b'"}\n'


SEAL_BYTES = len(seal(b""))


def check_header(raw: Any, magic: str, where: str) -> None:
    """Magic and major version, before any other field is looked at."""
    if not isinstance(raw, dict) or raw.get("magic") != magic:
        raise CorruptObject(f"{where}: does not say magic {magic!r}; it is no such object of a dcr_s3 run")
    version = raw.get("format")
    major = version.get("major") if isinstance(version, dict) else None
    if not isinstance(major, int):
        raise CorruptObject(f"{where}: names no format version")
    if major != FORMAT_MAJOR:
        raise UnsupportedFormat(
            f"{where}: written in format {major} by {str(raw.get('writer'))[:80]!r}; "
            f"this is {WRITER}, which reads format {FORMAT_MAJOR}: install a release that reads it"
        )


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or "document"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{place}: {first['msg']}{more}"
