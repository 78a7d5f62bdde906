"""One self-contained page about a run: no scripts from elsewhere, no fonts, no requests."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from html import escape
from importlib.resources import files
from itertools import pairwise
from statistics import median

from dcr_s3.dashboard.charts import Bar, bar_chart, short
from dcr_s3.overview import Overview, ReceiverSummary, VersionSummary
from dcr_s3.planning.model import PART_BYTES, Prices
from dcr_s3.reports import PublishReport, PullReport

_STYLE = files("dcr_s3.dashboard").joinpath("page.css").read_text()


def render(
    run: Overview,
    *,
    url: str,
    made_at: str,
    reports: Sequence[PublishReport | PullReport] = (),
    prices: Prices | None = None,
    refresh_s: int | None = None,
) -> str:
    """The page. ``reports`` are what publishing and pulling printed, for the seconds by stage, which no bucket knows;
    with ``refresh_s`` the page loads itself anew."""
    deltas = [v for v in run.versions if v.kind == "delta"]
    sections = [
        ("Changed elements of each version", _density(deltas)),
        ("Bytes of each version, against a full copy", _bytes(deltas)),
        ("Seconds between versions", _cadence(deltas)),
        ("Seconds by stage", _stages(reports)),
        ("Receivers", _receivers(run)),
        ("Versions", _versions(deltas)),
    ]
    shown = "".join(f"<section><h2>{title}</h2>{body}</section>" for title, body in sections if body)
    again = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    facts = f"{run.tensors:,} tensors, {run.total_elements:,} elements, a full copy has {short(run.dense_bytes, 'B')}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{again}<title>dcr_s3 {escape(url)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><main><h1>{escape(url)}</h1>"
        f'<p class="soft">run {run.run_id}, made {escape(run.created_at)}, coding {run.coding}<br>{facts}</p>'
        f'<div class="tiles">{_tiles(run, deltas, prices or Prices())}</div>{shown}'
        f'<p class="soft">read from the bucket {escape(made_at)}</p></main></body></html>\n'
    )


def _tiles(run: Overview, deltas: Sequence[VersionSummary], prices: Prices) -> str:
    moved = sum(v.wire_bytes for v in deltas)
    full = run.dense_bytes * len(deltas)
    intervals = _intervals(deltas)
    behind = sum(r.lag > 0 for r in run.receivers)
    tiles = [
        (f"{run.version:,}", "newest version" + (f", step {deltas[-1].step}" if deltas and deltas[-1].step else "")),
        (f"{100 * deltas[-1].changed_elements / deltas[-1].total_elements:.3g} %" if deltas else "-", "changed last"),
        (f"{full / moved:,.0f}x" if moved else "-", f"less: {short(moved, 'B')} for {short(full, 'B')}"),
        (f"{median(intervals):.3g} s" if intervals else "-", "between versions (median)"),
        (f"{len(run.receivers) - behind} of {len(run.receivers)}", "receivers at the newest version"),
        (f"${spent(run, prices):,.4f}", "requests and storage so far, at list price"),
    ]
    return "".join(f'<div class="tile"><b>{value}</b><span>{escape(name)}</span></div>' for value, name in tiles)


def spent(run: Overview, prices: Prices) -> float:
    """Dollars of the shown versions: writing them, every known receiver's reading them, storing them until now."""
    total = 0.0
    newest = max((_time(v.created_at) for v in run.versions), default=0.0)
    for v in run.versions:
        total += (v.segments + 1) * prices.per_put
        total += (1 + max(v.segments, v.wire_bytes // PART_BYTES)) * len(run.receivers) * prices.per_get
        months = (newest - _time(v.created_at)) / (30 * 86400)
        total += v.wire_bytes / 1e9 * months * prices.per_gb_month
    return total


def _density(deltas: Sequence[VersionSummary]) -> str:
    bars = []
    for v in deltas:
        share = 100 * v.changed_elements / max(v.total_elements, 1)
        title = f"version {v.version}: {v.changed_elements:,} of {v.total_elements:,} elements ({share:.3g} %)"
        bars.append(Bar(str(v.version), {"changed": share}, title))
    return bar_chart(bars, unit="%") if bars else '<p class="soft">no version yet</p>'


def _bytes(deltas: Sequence[VersionSummary]) -> str:
    bars = []
    for v in deltas:
        times = v.dense_bytes / max(v.wire_bytes, 1)
        title = f"version {v.version}: {short(v.wire_bytes, 'B')}, {times:,.0f} times less than a full copy"
        bars.append(Bar(str(v.version), {"bytes": float(v.wire_bytes)}, title))
    if not bars:
        return ""
    return bar_chart(bars, unit="B", log=True, reference=("full copy", float(deltas[0].dense_bytes)))


def _cadence(deltas: Sequence[VersionSummary]) -> str:
    pairs = zip(deltas[1:], _intervals(deltas), strict=True)
    bars = [Bar(str(v.version), {"s": s}, f"version {v.version}: {s:.3g} s after the one before") for v, s in pairs]
    return bar_chart(bars, unit="s") if bars else ""


def _stages(reports: Sequence[PublishReport | PullReport]) -> str:
    bars = []
    for report in sorted(reports, key=lambda r: r.version):
        side = "publish" if isinstance(report, PublishReport) else "pull"
        parts = {f"{side} {k}": s for k, s in report.seconds.items() if k != "total" and s > 0}
        shown = ", ".join(f"{name} {s:.3g} s" for name, s in parts.items())
        title = f"version {report.version}: {shown}; whole {report.seconds.get('total', 0):.3g} s (stages overlap)"
        bars.append(Bar(str(report.version), parts, title))
    return bar_chart(bars, unit="s") if bars else ""


def _receivers(run: Overview) -> str:
    if not run.receivers:
        return '<p class="soft">no receiver has acknowledged anything yet</p>'
    rows = "".join(_receiver(r, run.version) for r in sorted(run.receivers, key=lambda r: (-r.lag, r.name)))
    return f"<table><tr><th>name<th>version<th>lag<th><th>last proof<th></tr>{rows}</table>"


def _receiver(r: ReceiverSummary, newest: int) -> str:
    share = 100 * r.version / max(newest, 1)
    proof = {True: '<td class="good">bits proved', False: '<td class="bad">another state than the run', None: "<td>-"}
    return (
        f'<tr class="receiver"><td>{escape(r.name)}<td>{r.version}<td>{r.lag}'
        f'<td><div class="track"><i style="width:{share:.0f}%"></i></div>'
        f"<td>{escape(r.proved_at)}{proof[r.matches]}</tr>"
    )


def _versions(deltas: Sequence[VersionSummary]) -> str:
    rows = "".join(
        f'<tr class="version"><td>{v.version}<td>{"" if v.step is None else v.step}<td>{v.epoch}'
        f"<td>{100 * v.changed_elements / max(v.total_elements, 1):.3g} %<td>{short(v.wire_bytes, 'B')}"
        f"<td>{v.dense_bytes / max(v.wire_bytes, 1):,.0f}x<td>{v.segments}<td>{escape(v.created_at)}</tr>"
        for v in reversed(deltas)
    )
    head = "<tr><th>version<th>step<th>epoch<th>changed<th>bytes<th>less<th>segments<th>committed</tr>"
    return f"<table>{head}{rows}</table>" if deltas else ""


def _intervals(deltas: Sequence[VersionSummary]) -> list[float]:
    times = [_time(v.created_at) for v in deltas]
    return [max(after - before, 0.0) for before, after in pairwise(times)]


def _time(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0
