"""Commands for those who operate runs: relay, doctor, diff, dashboard, plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcr_s3.cli.commands import EXIT_CODES, app
from dcr_s3.cli.options import AsJson, Base, Newest, PollInterval, Quiet, RunUrl, UntilVersion, Verbose
from dcr_s3.cli.output import Output, percent, size
from dcr_s3.cli.stopping import stop_by_event
from dcr_s3.cli.tables import table

if TYPE_CHECKING:
    from dcr_s3.recoding import RecodeReport
    from dcr_s3.relay import RelayReport

Prefix = Annotated[list[str], typer.Argument(metavar="TARGET...", help="Addresses to copy to, like RUN.")]


@app.command(epilog=EXIT_CODES)
def relay(
    source: RunUrl,
    targets: Prefix,
    name: Annotated[str, typer.Option("--name", help="What the relay acknowledges under at RUN.")] = "relay",
    once: Annotated[bool, typer.Option("--once", help="Copy what is committed now, then end.")] = False,
    no_ack: Annotated[bool, typer.Option("--no-ack", help="Write nothing at RUN.")] = False,
    fold_behind: Annotated[
        int | None,
        typer.Option(
            "--fold-behind", metavar="N", min=2, help="So many versions behind, copy a fold instead, if there is one."
        ),
    ] = None,
    recode: Annotated[
        Path | None,
        typer.Option("--recode", metavar="DIR", help="Code anew, context free, with a mirror in DIR; one target only."),
    ] = None,
    base: Base = None,
    poll_interval: PollInterval = 2.0,
    until_version: UntilVersion = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Copy a run to other buckets as it grows, so that each region fetches a version once. Ctrl-C ends it.

    Receivers there use the target like any run. Relays may read from relays, and several with one target do no harm.
    """
    from dcr_s3.errors import BadInput
    from dcr_s3.recoding import Recoder
    from dcr_s3.relay import Relay

    with Output(as_json=as_json, quiet=quiet, verbose=verbose) as out, stop_by_event() as stop:
        work: Relay | Recoder
        if recode is None:
            if base is not None:
                raise BadInput("--base is for --recode; a relay of the bytes as they are needs none")
            acknowledge = not no_ack
            work = Relay(
                source, targets, name=name, acknowledge=acknowledge, fold_behind=fold_behind, progress=out.progress
            )
        else:
            if len(targets) != 1 or fold_behind is not None:
                raise BadInput("--recode has one target, and needs every version: no --fold-behind")
            work = Recoder(
                source, targets[0], recode, base=base, name=name, acknowledge=not no_ack, progress=out.progress
            )
        last: RelayReport | RecodeReport | None = None

        def on_version(report: RelayReport | RecodeReport) -> None:
            nonlocal last
            last = report
            out.note(f"version {report.version} is at {', '.join(targets)}")

        if once:
            last = work.copy()
        else:
            work.follow(on_version, stop, until_version, poll_interval)
        if last is not None and not stop.is_set():
            moved = f"{size(last.down_bytes)} read, {size(last.up_bytes)} written"
            out.result(last.model_dump(mode="json"), f"relayed to version {last.version}: {moved}")


@app.command(epilog=EXIT_CODES)
def doctor(run: RunUrl, as_json: AsJson = False, quiet: Quiet = False, verbose: Verbose = 0) -> None:
    """Try a bucket: rights, clock, speed, and every promise of a store that a run relies on. Cleans up after itself.

    Ends with code 12 if something was found that a run cannot work with.
    """
    from dcr_s3.doctor import examine
    from dcr_s3.errors import ConfigError

    with Output(as_json=as_json, quiet=quiet, verbose=verbose) as out:
        found = examine(run, progress=out.progress)
        wrong = table("what is not as it should be", "<check", "<severity", "<what it means", "<what was seen")
        for check in found.checks:
            if not check.ok:
                wrong.add_row(check.name, check.severity, check.meaning, check.detail)
        good = sum(c.ok for c in found.checks)
        lines = [f"{found.url}: {good} of {len(found.checks)} checks passed"]
        if found.latency_s is not None:
            up, down = size(int(found.upload_bytes_per_s or 0)), size(int(found.download_bytes_per_s or 0))
            lines.append(f"a small request takes {1000 * found.latency_s:.0f} ms; {up}/s up, {down}/s down")
        shown = [wrong] if good < len(found.checks) else []
        verdict = "a run works here" if found.usable else "a run does not work here"
        out.result({**found.model_dump(mode="json"), "usable": found.usable}, *lines, *shown, verdict)
    if not found.usable:
        raise typer.Exit(ConfigError.exit_code)


@app.command(epilog=EXIT_CODES)
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="Checkpoint directory.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Checkpoint directory with the same tensors.")],
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Draw layers and parts as a heat map.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Show which tensors of two checkpoints differ, bit for bit, and by how much."""
    from dcr_s3.dashboard.heatmap import heatmap_svg
    from dcr_s3.difference import compare

    with Output(as_json=as_json, quiet=quiet, verbose=verbose) as out:
        found = compare(a, b, progress=out.progress)
        if svg is not None:
            svg.write_text(heatmap_svg(found))
            out.note(f"drawn: {svg}")
        shown = table("most changed", "<tensor", "changed", "share", "<")
        for tensor in sorted(found.tensors, key=lambda t: -t.ratio)[:20]:
            bar = "█" * round(30 * tensor.ratio / max(t.ratio for t in found.tensors)) if tensor.ratio else ""
            share = percent(tensor.changed_elements, tensor.elements)
            shown.add_row(tensor.name, f"{tensor.changed_elements:,}", share, bar)
        share = percent(found.changed_elements, found.total_elements)
        line = f"{found.changed_elements:,} of {found.total_elements:,} elements differ ({share})"
        out.result(found.model_dump(mode="json"), line, shown)


@app.command(epilog=EXIT_CODES)
def dashboard(
    run: RunUrl,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the page and end.")
    ] = None,
    port: Annotated[
        int, typer.Option("--port", help="Where to serve it, on loopback only; 0 takes a free one.")
    ] = 8321,
    last: Newest = 100,
    reports: Annotated[
        list[Path] | None,
        typer.Option("--reports", metavar="FILE", help="What publish or pull printed with --json, one object a line."),
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Show a run on one page: serve it on loopback until Ctrl-C, or write it to a file."""
    from dcr_s3.cli.serving import make_page, serve_page

    with Output(quiet=quiet, verbose=verbose) as out:
        if output is not None:
            output.write_text(make_page(run, last=last, reports=reports or []))
            out.note(f"written: {output}")
            return
        with stop_by_event() as stop:
            for address in serve_page(run, port=port, last=last, reports=reports or [], stop=stop):
                out.note(f"http://{address}/ (Ctrl-C ends it)")
