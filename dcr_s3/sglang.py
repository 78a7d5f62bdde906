"""SGLang as a target, over HTTP: a server that serves from a receiver's directory loads it again after each version."""

from __future__ import annotations

import json
import logging
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from dcr_s3.errors import BadInput, StateMismatch, StoreUnavailable
from dcr_s3.patience import Patience
from dcr_s3.world import world

log = logging.getLogger(__name__)


class SglangServer:
    """A server that was started from ``directory`` (as it sees it), the mirror of a receiver.

    Its own loader reads the directory, so all of what it does to weights is done. With ``abort`` running requests are
    aborted first; without, the server lets them finish before it loads. The cache of prefixes is always flushed.
    """

    def __init__(self, url: str, directory: Path | str, *, abort: bool = False, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self.directory = Path(directory)
        self._abort = abort
        self._timeout_s = timeout_s

    def version(self) -> int | None:
        """The version that the server says it serves; None if it was never told one."""
        said = str(self._send("/get_model_info", None).get("weight_version", ""))
        return int(said) if said.isdecimal() else None

    def serve(self, version: int) -> None:
        """Makes the server load the directory, which holds ``version`` and must not change meanwhile.

        The path it is given names the version: a link beside the directory. Asking again is harmless. Raises
        ``StoreUnavailable`` if the server does not answer or could not load now, which may pass; ``BadInput`` if it
        refuses; ``StateMismatch`` if it says that it serves another version afterwards.
        """
        if self.version() == version:
            return
        path = self._link(version)
        body = {
            "model_path": str(path),
            "abort_all_requests": self._abort,
            "weight_version": str(version),
            "flush_cache": True,
            "keep_pause": False,
        }
        answer = self._send("/update_weights_from_disk", body)
        if not answer.get("success"):
            raise StoreUnavailable(f"{self.url}: version {version} was not loaded: {answer.get('message')}")
        if self.version() != version:
            raise StateMismatch(f"{self.url}: was told to serve version {version}, but says {self.version()}")
        self._unlink_others(path)
        log.info("%s serves version %d", self.url, version)

    def _link(self, version: int) -> Path:
        link = self.directory.with_name(f"{self.directory.name}@{version:012d}")
        if not link.is_symlink():
            link.symlink_to(self.directory.resolve(), target_is_directory=True)
        return link

    def _unlink_others(self, kept: Path) -> None:
        for other in self.directory.parent.glob(f"{self.directory.name}@*"):
            if other != kept and other.is_symlink():
                other.unlink()

    def _send(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as reply:
                text = reply.read()
        except urllib.error.HTTPError as error:
            text = error.read()
            if error.code >= 500:
                raise StoreUnavailable(f"{self.url}{path}: {error.code}: {text[:300]!r}") from None
            if error.code != 400 or b'"success"' not in text:
                raise BadInput(f"{self.url}{path}: {error.code}: {text[:300]!r}") from None
        except OSError as error:
            raise StoreUnavailable(f"{self.url}{path}: no answer ({error}); is the server running?") from None
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise BadInput(f"{self.url}{path}: answered {text[:100]!r}, which is not what an SGLang server says")
        return found


def serve_patiently(server: SglangServer, version: int, stop: threading.Event, *, interval_s: float) -> bool:
    """Has the server load ``version``, asking again while it cannot; False if ``stop`` was set before it could.

    The directory must not change meanwhile.
    """
    patience = Patience(interval_s)
    while not stop.is_set():
        try:
            server.serve(version)
            return True
        except StoreUnavailable as error:
            world().wait(stop, patience.after(error) * world().uniform(0.75, 1.25))
    return False
