"""Which manifest may follow which position."""

from __future__ import annotations

from dcr_s3.errors import ChainBroken, CorruptObject
from dcr_s3.format.digest import sha256_hex
from dcr_s3.format.keys import manifest_key
from dcr_s3.format.manifest import Manifest
from dcr_s3.protocol.position import Position


def read_next(position: Position, body: bytes) -> tuple[Manifest, Position]:
    """The manifest in ``body`` and the position it leads to, if it may follow ``position``.

    Raises ``CorruptObject`` or ``UnsupportedFormat`` for what is no valid manifest of that version, ``ChainBroken`` for
    a valid one with another past.
    """
    where = manifest_key(position.version + 1)
    manifest = Manifest.from_bytes(body, where=where)
    check_follows(manifest, position)
    return manifest, position_after(manifest, body, earlier_step=position.step)


def position_after(manifest: Manifest, body: bytes, *, earlier_step: int | None = None) -> Position:
    """The position a manifest leads to. A fence keeps the step before it, ``earlier_step``."""
    return Position(
        run_id=manifest.run_id,
        version=manifest.version,
        sha256=sha256_hex(body),
        epoch=manifest.epoch,
        state=manifest.state_after,
        step=manifest.step if manifest.kind == "delta" else earlier_step,
        next_attempt=manifest.next_attempt,
    )


def check_follows(manifest: Manifest, position: Position) -> None:
    """Raises ``CorruptObject`` or ``ChainBroken`` unless a manifest may be applied at a position."""
    where = manifest_key(position.version + 1)
    if manifest.version != position.version + 1:
        raise CorruptObject(f"{where}: says version {manifest.version}")
    if manifest.run_id != position.run_id:
        raise ChainBroken(
            f"{where}: belongs to run {manifest.run_id}, not to {position.run_id}; the address was reused"
        )
    if manifest.parent.sha256 != position.sha256:
        raise ChainBroken(f"{where}: follows another version {position.version} than the one held here")
    if manifest.state_before != position.state:
        raise ChainBroken(
            f"{where}: starts from state {manifest.state_before}, but version {position.version} has {position.state}"
        )
    if manifest.epoch < position.epoch or (manifest.kind == "fence" and manifest.epoch == position.epoch):
        raise ChainBroken(f"{where}: epoch {manifest.epoch} after epoch {position.epoch}")
