"""Tables for people."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table

from dcr_s3.cli.output import percent, ratio, size
from dcr_s3.overview import Anatomy, Overview


def table(title: str, *columns: str) -> Table:
    """An empty table; columns whose name starts with ``<`` are aligned left, all others right."""
    made = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        if name.startswith("<"):
            made.add_column(name[1:], overflow="fold")
        else:
            made.add_column(name, justify="right", no_wrap=True)
    return made


def status_tables(found: Overview) -> list[RenderableType]:
    """The run in a line, what else it offers, its versions, its receivers."""
    line = f"run {found.run_id}, made {found.created_at}, coding {found.coding}"
    sizes = f"{found.tensors:,} tensors, {found.total_elements:,} elements, a full copy has {size(found.dense_bytes)}"
    shown: list[RenderableType] = [line, sizes]
    if found.snapshots:
        shown.append(f"full copies in the bucket: version {', '.join(map(str, found.snapshots))}")
    if found.folds:
        shown.append(f"folds: {', '.join(f'{first} to {last}' for first, last in found.folds)}")
    if found.release is not None:
        by = f"{len(found.release.proved_by)} receivers had proved it"
        shown.append(f"released: version {found.release.version}, {found.release.released_at}; {by}")
    versions = table(
        f"version {found.version} is the newest", "version", "step", "epoch", "changed", "bytes", "less", "<made"
    )
    for v in found.versions:
        step = "" if v.step is None else str(v.step)
        changed = "fence" if v.kind == "fence" else percent(v.changed_elements, v.total_elements)
        less = "" if v.kind == "fence" else ratio(v.dense_bytes, v.wire_bytes)
        versions.add_row(str(v.version), step, str(v.epoch), changed, size(v.wire_bytes), less, v.created_at)
    receivers = table("receivers", "<name", "version", "lag", "<proved", "<lease until")
    for r in found.receivers:
        wrong = " (another state than the run's!)" if r.matches is False else ""
        over = "" if r.alive else " (over: nobody waits for it)"
        receivers.add_row(r.name, str(r.version), str(r.lag), r.proved_at + wrong, r.lease_until + over)
    return [*shown, versions, receivers if found.receivers else "no receiver has acknowledged anything yet"]


def inspect_tables(found: Anatomy) -> list[RenderableType]:
    """The manifest's lines, the segments, the codings, the busiest tensors."""
    step = "" if found.step is None else f", step {found.step}"
    changed = f"{found.changed_elements:,} of {found.total_elements:,} elements changed"
    share = percent(found.changed_elements, found.total_elements)
    less = ratio(found.dense_bytes, found.wire_bytes)
    shown: list[RenderableType] = [
        f"version {found.version} ({found.kind}{step}), made {found.created_at} by {found.writer}",
        f"epoch {found.epoch}, attempt {found.attempt}, manifest {found.manifest_sha256}",
        f"state {found.state_before} -> {found.state_after}",
        f"{changed} ({share}) in {found.tensors_touched:,} tensors",
        f"{size(found.wire_bytes)} instead of {size(found.dense_bytes)} ({less} less)",
    ]
    segments = table("segments", "<key", "bytes", "blocks", "changed")
    for s in found.segments:
        segments.add_row(s.key, size(s.size_bytes), str(s.blocks), f"{s.changed_elements:,}")
    codings = table("codings", "<coding", "blocks", "changed", "bytes", "bits per change")
    for c in found.codings:
        bits = f"{8 * c.payload_bytes / c.changed_elements:.2f}" if c.changed_elements else ""
        codings.add_row(c.coding, str(c.blocks), f"{c.changed_elements:,}", size(c.payload_bytes), bits)
    busiest = table("most changes", "<tensor", "changed", "share", "bytes")
    for p in found.busiest:
        more = f" (+ {p.tensors - 1} that share its blocks)" if p.tensors > 1 else ""
        share = percent(p.changed_elements, p.elements)
        busiest.add_row(p.first_tensor + more, f"{p.changed_elements:,}", share, size(p.payload_bytes))
    return shown + ([segments, codings, busiest] if found.segments else [])
