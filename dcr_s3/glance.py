"""A look that costs one request: whether a directory already holds the newest version."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from dcr_s3.errors import CorruptObject, NotFound
from dcr_s3.format.document import Document
from dcr_s3.format.keys import manifest_key
from dcr_s3.reports import PullReport
from dcr_s3.store.base import Store
from dcr_s3.targets.state import WORK_DIR, read_state, write_durably
from dcr_s3.world import world

_FILE = "glance.json"


class Glance(Document):
    """What a report says of a run, kept in the directory so that it need not be fetched. After ``until`` (seconds since
    the epoch) the receiver's lease is due, and a whole pull renews it."""

    MAGIC: ClassVar[str] = "dcr_s3/glance"
    magic: Literal["dcr_s3/glance"] = "dcr_s3/glance"

    run_id: str
    total_elements: int
    dense_bytes: int
    until: float


def glance(store: Store, directory: Path) -> PullReport | None:
    """The report of a pull that finds nothing new; None where there is, or may be, something to do.

    Sends one request, whose reply has no body. Raises store errors.
    """
    begun = world().monotonic()
    try:
        state = read_state(directory)
        known = Glance.from_bytes((directory / WORK_DIR / _FILE).read_bytes(), where=str(directory / WORK_DIR / _FILE))
    except (OSError, CorruptObject):
        return None
    if state is None or state.status != "clean" or state.journals or world().time() >= known.until:
        return None
    if known.run_id != state.position.run_id:
        return None
    try:
        store.head(manifest_key(state.position.version + 1))
    except NotFound:
        return PullReport(
            version=state.position.version,
            from_version=state.position.version,
            step=state.position.step,
            total_elements=known.total_elements,
            dense_bytes=known.dense_bytes,
            seconds={"total": round(world().monotonic() - begun, 6)},
            up_to_date=True,
            applied_at=world().time(),
        )
    return None


def remember(directory: Path, report: PullReport, *, for_s: float) -> None:
    """Makes glances possible for ``for_s`` seconds, after a pull with this report."""
    state = read_state(directory)
    if state is not None and state.position.version == report.version:
        known = Glance(
            run_id=state.position.run_id,
            total_elements=report.total_elements,
            dense_bytes=report.dense_bytes,
            until=world().time() + for_s,
        )
        write_durably(directory / WORK_DIR / _FILE, known.to_bytes())
