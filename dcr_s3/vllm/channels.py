"""How all workers of a vLLM engine are reached: through an ``LLM`` or ``AsyncLLM`` object, or its HTTP server."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Coroutine
from typing import Any, Literal

from dcr_s3.errors import BadInput, DcrError, StoreUnavailable
from dcr_s3.rank import results, revived

PauseMode = Literal["wait", "keep", "abort"]
"""What happens to running requests: they are finished first, frozen and continued with the new weights, or aborted."""

_NO_EXTENSION = "start vLLM with worker_extension_cls (--worker-extension-cls) dcr_s3.vllm.worker.RankExtension"


class LlmRanks:
    """All workers of an ``LLM`` in another process or in several; it was made with the worker extension.

    It is also the engine's gate: an ``LLM`` generates only while its methods are called.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """As :meth:`Ranks.call`. Raises ``BadInput`` where the extension is missing."""
        try:
            answers = self._llm.collective_rpc("dcr_s3", args=(method, json.dumps(arguments)))
        except (AttributeError, NotImplementedError) as error:
            raise BadInput(f"vLLM's workers do not know dcr_s3 ({error}); {_NO_EXTENSION}") from error
        return results(answers)

    def serving(self, version: int) -> None:
        """As :meth:`Ranks.serving`; ``get_weight_version`` tells it, where the engine has that."""
        if hasattr(self._llm, "update_weight_version"):
            self._llm.update_weight_version(str(version))

    def close(self) -> None:
        """Nothing runs now."""

    def open(self) -> None:
        """Nothing to let in."""

    def reset_caches(self) -> None:
        """Drops cached prefixes."""
        if not self._llm.reset_prefix_cache():
            raise BadInput("vLLM did not reset its prefix cache: requests are still running")


class AsyncRanks:
    """All workers of an ``AsyncLLM``, which was made with the worker extension, and its gate.

    The engine's event loop is the one that this is made on; a receiver works in another thread, as by
    ``await asyncio.to_thread(receiver.pull)``. ``timeout_s`` bounds every call, draining included.
    """

    def __init__(self, engine: Any, *, pause_mode: PauseMode = "wait", timeout_s: float = 600.0) -> None:
        self._engine = engine
        self._pause_mode = pause_mode
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """As :meth:`Ranks.call`. Raises ``BadInput`` where the extension is missing."""
        answers = self._wait(self._engine.collective_rpc("dcr_s3", args=(method, json.dumps(arguments))))
        return results(answers)

    def serving(self, version: int) -> None:
        """As :meth:`Ranks.serving`; ``get_weight_version`` tells it, where the engine has that."""
        if hasattr(self._engine, "update_weight_version"):
            self._wait(self._engine.update_weight_version(str(version)))

    def close(self) -> None:
        """Pauses the engine."""
        self._wait(self._engine.pause_generation(mode=self._pause_mode, clear_cache=False))

    def open(self) -> None:
        """Lets the engine go on."""
        self._wait(self._engine.resume_generation())

    def reset_caches(self) -> None:
        """Drops cached prefixes. Requests that were kept compute theirs anew."""
        kept = self._pause_mode == "keep"
        if not self._wait(self._engine.reset_prefix_cache(reset_running_requests=kept)):
            raise DcrError("vLLM did not reset its prefix cache; requests still hold it")

    def _wait(self, call: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result(self._timeout_s)
        except TimeoutError:
            future.cancel()
            raise StoreUnavailable(f"vLLM's engine did not answer within {self._timeout_s:g} s") from None
        except Exception as error:
            if "has no attribute" in str(error):
                raise BadInput(f"vLLM's workers do not know dcr_s3 ({error}); {_NO_EXTENSION}") from error
            raise DcrError(f"vLLM's engine: {error}") from error


class HttpRanks:
    """All workers behind a vLLM server, and its gate.

    The server runs with ``VLLM_SERVER_DEV_MODE=1``, the worker extension, and the weight-transfer backend ``dcr_s3``.
    ``timeout_s`` bounds every request to it, draining included.
    """

    def __init__(self, url: str, *, pause_mode: PauseMode = "wait", timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._pause_mode = pause_mode
        self._timeout_s = timeout_s

    def model(self) -> str:
        """The checkpoint that the server was started from."""
        return str(self._send("/v1/models", None)["data"][0]["root"])

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """As :meth:`Ranks.call`. Binding and writing go through vLLM's own weight-transfer calls too; an empty base
        means the checkpoint that the server was started from.
        """
        if method == "apply":
            return self._apply(*arguments)
        if method == "open":
            run, base, limit_s, nearby = arguments
            arguments = (run, base or self.model(), limit_s, nearby)
            info = dict(zip(("run", "base", "pause_limit_s", "nearby"), arguments, strict=True))
            self._post("/init_weight_transfer_engine", {"init_info": info})
        return self._call(method, *arguments)

    def serving(self, version: int) -> None:
        """As :meth:`Ranks.serving`; ``/weight_info`` tells it."""
        self._post("/update_weight_version", {"new_version": str(version)})

    def close(self) -> None:
        """Pauses the server."""
        self._post(f"/pause?mode={self._pause_mode}", {})

    def open(self) -> None:
        """Lets the server go on."""
        self._post("/resume", {})

    def reset_caches(self) -> None:
        """Drops cached prefixes. Requests that were kept compute theirs anew."""
        kept = "?reset_running_requests=true" if self._pause_mode == "keep" else ""
        done = self._post(f"/reset_prefix_cache{kept}", {})
        if done is not None and not done.get("success", True):
            raise DcrError(f"{self.url}: vLLM did not reset its prefix cache; requests still hold it")

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        body = {"method": "dcr_s3", "args": [method, json.dumps(arguments)]}
        try:
            answers = self._post("/collective_rpc", body)
        except DcrError as error:
            if "has no attribute" in str(error) or "dcr_s3" in str(error):
                raise BadInput(f"{error}; {_NO_EXTENSION}") from None
            raise
        return results(answers["results"])

    def _apply(self, version: int, verify: bool) -> list[Any]:
        self._post("/start_weight_update", {})
        try:
            self._post("/update_weights", {"update_info": {"version": version, "verify": verify}})
        except DcrError as error:
            for status in self._call("status"):
                if status["error"]:
                    raise revived(status["error_kind"], status["error"]) from error
            raise
        finally:
            self._finish()
        return self._call("status")

    def _finish(self) -> None:
        """Ends the update on every worker, also on those that did not fail."""
        try:
            self._post("/finish_weight_update", {})
        except StoreUnavailable:
            raise
        except DcrError:
            return  # a worker that failed has ended its update already

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._send(path, json.dumps(body).encode())

    def _send(self, path: str, body: bytes | None) -> Any:
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as reply:
                text = reply.read()
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")[:500]
            if error.code == 404:
                raise BadInput(f"{self.url}{path}: not found; start the server with VLLM_SERVER_DEV_MODE=1") from None
            raise DcrError(f"{self.url}{path}: {error.code}: {detail}") from None
        except OSError as error:
            raise StoreUnavailable(f"{self.url}{path}: no answer ({error}); is the server running?") from None
        return json.loads(text) if text else None
