"""A receiver that meets every segment with one bit of a payload flipped, before and after the commit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from dcr_s3 import Receiver, Sender
from dcr_s3.errors import DcrError
from dcr_s3.format.segment import parse_segment
from dcr_s3.store.base import Object
from dcr_s3.store.memory import MemoryStore
from dcr_s3.store.wrapped import Request, WrappedStore
from dcr_s3.testing.checkpoints import changed, differing, load, make_state, save
from dcr_s3.testing.sim import Violation

R = TypeVar("R")

FLIPS = 24


class Flipping(WrappedStore):
    """Flips one bit in the middle of the first block of every segment that is read: the ``bit``th from there on."""

    bit = 0

    def around(self, request: Request, send: Callable[[Request], R]) -> R:
        result = send(request)
        if not request.key.startswith("segments/"):
            return result
        if isinstance(result, Object):
            body = bytearray(result.body)
            self._flip(body, bytes(body))
            return Object(bytes(body), result.etag)  # type: ignore[return-value]
        if request.buffer is not None:
            self._flip(request.buffer, bytes(request.buffer))
        return result

    def _flip(self, body: bytearray | memoryview, intact: bytes) -> None:
        block = parse_segment(memoryview(intact), where="").blocks[0]
        at, bit = divmod(8 * (block.offset + block.size_bytes // 2) + self.bit, 8)
        body[at] ^= 1 << bit


def meet_flipped_bits() -> None:
    """Raises ``Violation`` if bits that are not those of the version are taken for it."""
    with TemporaryDirectory() as directory:
        root = Path(directory)
        state = make_state(0)
        store = MemoryStore()
        with Sender.open(store, base=save(state, root / "base"), state_dir=root / "state", workers=0) as sender:
            flipping = Flipping(store)
            receivers = [Receiver(flipping, root / f"mirror-{n}", base=root / "base", workers=0) for n in range(FLIPS)]
            for receiver in receivers:
                receiver.pull()
            wanted = changed(state, 1, 0.05)
            sender.publish(save(wanted, root / "trained"))
        for bit, receiver in enumerate(receivers):
            flipping.bit = bit
            try:
                with receiver._open() as (_, replay):
                    replay.stage_ahead()
                    version = [step.version for step in replay.catch_up()]
            except DcrError:
                continue
            if differing(load(receiver.directory), wanted):
                raise Violation(f"a receiver takes bits with one flipped for version {version}")
