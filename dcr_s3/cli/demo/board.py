"""The demonstration's table: one row per published step, filled in as the receivers report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import BaseModel
from rich.table import Table

from dcr_s3.cli.demo.fleet import Fleet
from dcr_s3.cli.output import percent, ratio, size
from dcr_s3.cli.tables import table
from dcr_s3.reports import PublishReport


class StepRow(BaseModel):
    """One published step. ``receiver_seconds`` counts from the commit until a receiver held the version.

    ``exact`` tells whether every mirror had the bits of the trainer's dense checkpoint at this very version; None where
    a receiver has not been there, or went past it in one pull with the next.
    """

    step: int
    version: int
    reward: float
    changed_elements: int
    total_elements: int
    wire_bytes: int
    dense_bytes: int
    publish_seconds: float
    receiver_seconds: dict[str, float] = {}
    exact: bool | None = None


class Board:
    """Rows so far. The trainer adds them; ``refresh`` looks up what the receivers have said."""

    def __init__(self, fleet: Fleet) -> None:
        self.rows: list[StepRow] = []
        self._fleet = fleet
        self._committed_at: list[float] = []
        self._bits: list[str] = []

    def add(self, report: PublishReport, *, step: int, reward: float, publish_seconds: float, bits: str) -> None:
        """A new step; ``bits`` is the digest of the trainer's dense checkpoint of it."""
        row = StepRow(
            step=step,
            version=report.version,
            reward=reward,
            changed_elements=report.changed_elements,
            total_elements=report.total_elements,
            wire_bytes=report.wire_bytes,
            dense_bytes=report.dense_bytes,
            publish_seconds=publish_seconds,
        )
        self._committed_at.append(report.committed_at)
        self._bits.append(bits)
        self.rows.append(row)

    def refresh(self) -> None:
        """Fills in every arrival known by now."""
        for row, committed_at, bits in zip(self.rows, self._committed_at, self._bits, strict=False):
            arrivals = {name: self._fleet.arrival(name, row.version) for name in self._fleet.names}
            there = {name: arrival for name, arrival in arrivals.items() if arrival is not None}
            # A receiver may be done before the sender's own reply is in.
            row.receiver_seconds = {n: max(0.0, a.report.applied_at - committed_at) for n, a in there.items()}
            if len(there) == len(arrivals) and all(a.report.version == row.version for a in there.values()):
                row.exact = all(a.bits == bits for a in there.values())

    def render(self) -> Table:
        """The table as it stands."""
        self.refresh()
        return step_table(self.rows, self._fleet.names)


def step_table(rows: Sequence[StepRow], receivers: Sequence[str]) -> Table:
    """Rows as a table."""
    made = table(
        "", "step", "version", "reward", "changed", "sent", "full copy", "less", "publish", *receivers, "<bits"
    )
    for row in rows:
        made.add_row(
            str(row.step),
            str(row.version),
            f"{row.reward:.3f}",
            percent(row.changed_elements, row.total_elements),
            size(row.wire_bytes),
            size(row.dense_bytes),
            ratio(row.dense_bytes, row.wire_bytes),
            f"{row.publish_seconds:.2f} s",
            *(_seconds(row.receiver_seconds, name) for name in receivers),
            {None: "", True: "equal", False: "DIFFERENT"}[row.exact],
        )
    return made


def _seconds(found: Mapping[str, float], name: str) -> str:
    return f"{found[name]:.2f} s" if name in found else "…"
