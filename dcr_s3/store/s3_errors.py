"""What botocore and S3 servers report, as the errors of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import urllib3
from botocore import exceptions as boto
from botocore.exceptions import BotoCoreError, ClientError
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from dcr_s3.errors import (
    BadInput,
    BucketMissing,
    ConfigError,
    CorruptObject,
    Forbidden,
    NotFound,
    PreconditionFailed,
    StoreUnavailable,
)

_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.NoAuthTokenError,
    boto.TokenRetrievalError,
    boto.SSOError,
    boto.RefreshWithMFAUnsupportedError,
    boto.UnknownCredentialError,
)
_BROKEN_BODY = (boto.IncompleteReadError, boto.ResponseStreamingError)
_NETWORK = (boto.ConnectionError, boto.HTTPClientError)
_DAMAGED_CODES = ("BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "IncompleteBody")
_FORBIDDEN_HINTS = {
    "InvalidAccessKeyId": "the access key is unknown there: check the profile or AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key, or a proxy rewrites requests",
    "RequestTimeTooSkewed": "this machine's clock is wrong: synchronise it",
    "ExpiredToken": "the session token has expired: sign in again",
    "InvalidToken": "the session token is not valid there: sign in again",
    "ExpiredTokenException": "the session token has expired: sign in again",
}
_WRONG_REGION = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
_OVERLOADED_CODES = ("SlowDown", "RequestTimeout", "Throttling", "ThrottlingException", "RequestLimitExceeded")


class DamagedInTransit(StoreUnavailable):
    """A body that broke off, or that the store refused for its checksum. Sending or asking again is safe."""


class UploadGone(StoreUnavailable):
    """The store no longer knows the multipart upload."""


# botocore repeats requests that got no answer or a 5xx; a body that breaks off or arrives damaged is repeated here.
again_if_damaged = retry(
    retry=retry_if_exception_type(DamagedInTransit),
    stop=stop_after_attempt(4),
    wait=wait_random_exponential(multiplier=0.1, max=5),
    reraise=True,
)


@contextmanager
def translated(what: str, endpoint: str, *, conditional: bool = False) -> Iterator[None]:
    """Runs a request and raises this package's errors for botocore's. ``what`` says what was tried, verb first; with
    ``conditional`` the answers 404, 409 and 412 mean that a condition did not hold."""
    try:
        yield
    except ClientError as error:
        raise from_reply(error, what, endpoint, conditional) from error
    except BotoCoreError as error:
        raise _from_client(error, what, endpoint) from error
    except (urllib3.exceptions.HTTPError, aiohttp.ClientError) as error:
        # botocore lets these through where the body that broke off was an error reply's.
        raise DamagedInTransit(
            f"could not {what}: the reply from {endpoint} broke off several times; try again later"
        ) from error


def from_reply(error: ClientError, what: str, endpoint: str, conditional: bool) -> Exception:
    """The exception for a reply with an error status."""
    # The stubs promise keys that replies without a body lack.
    reply: Any = error.response
    code = str(reply.get("Error", {}).get("Code", ""))
    text = str(reply.get("Error", {}).get("Message", ""))
    status = int(reply.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    failed = f"could not {what}"
    if code == "NoSuchBucket":
        return BucketMissing(f"{failed}: there is no such bucket at {endpoint}; create it or correct the name")
    if conditional and status in (404, 409, 412):
        return PreconditionFailed(f"{failed}: its condition did not hold ({status} {code})")
    if code == "NoSuchUpload":
        return UploadGone(f"{failed}: the store no longer knows this upload, aborted or expired; start it again")
    if status == 404:
        return NotFound(f"{failed}: no such object")
    if status == 416 or code == "InvalidRange":
        return CorruptObject(f"{failed}: the object ends before the bytes that were asked for")
    return _from_refusal(status, code, text, failed, endpoint)


def _from_refusal(status: int, code: str, text: str, failed: str, endpoint: str) -> Exception:
    kind: type[Exception] = ConfigError
    advice = f"{endpoint} answered {status} {code} {text}".rstrip()
    if status in (301, 307) or code in _WRONG_REGION:
        advice = f"the bucket is in another region ({code or status}); set AWS_REGION or ?region= in the URL"
    elif code in _FORBIDDEN_HINTS:
        kind, advice = Forbidden, f"{_FORBIDDEN_HINTS[code]} ({code} from {endpoint})"
    elif status in (401, 403):
        kind, advice = Forbidden, f"{endpoint} refused the credentials ({code}); check their policy for this bucket"
    elif code == "EntityTooSmall":
        kind, advice = BadInput, "every part but the last needs 5 MiB or more"
    elif code in _DAMAGED_CODES:
        kind, advice = DamagedInTransit, f"it arrived damaged at {endpoint} ({code}) several times; try again later"
    elif status == 501:
        advice = f"{endpoint} does not implement this request ({code})"
    elif status >= 500 or status in (409, 429) or code in _OVERLOADED_CODES:
        kind, advice = StoreUnavailable, f"{endpoint} answered {status} {code} to every try; try again later"
    return kind(f"{failed}: {advice}")


def _from_client(error: BotoCoreError, what: str, endpoint: str) -> Exception:
    failed = f"could not {what}"
    if isinstance(error, _CREDENTIALS):
        return ConfigError(
            f"{failed}: no usable AWS credentials ({type(error).__name__}); name a profile (AWS_PROFILE or ?profile=), "
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run where a role gives them"
        )
    if isinstance(error, boto.SSLError):
        return ConfigError(
            f"{failed}: no TLS connection to {endpoint} ({error}); check http or https and AWS_CA_BUNDLE"
        )
    if isinstance(error, _BROKEN_BODY):
        return DamagedInTransit(f"{failed}: the reply from {endpoint} broke off several times; try again later")
    if isinstance(error, _NETWORK):
        return StoreUnavailable(
            f"{failed}: no answer from {endpoint or 'the endpoint'} ({type(error).__name__}); "
            "check the endpoint and the network, or try again later"
        )
    return ConfigError(f"{failed}: {error}")
