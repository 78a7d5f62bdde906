"""The commands. Each parses, calls the library, prints."""

from __future__ import annotations

from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcr_s3.cli.options import (
    AsJson,
    Base,
    Directory,
    Mirror,
    Nearby,
    Newest,
    Quiet,
    ReleasedOnly,
    RunUrl,
    TextFile,
    Verbose,
)
from dcr_s3.cli.output import Output, percent, ratio, size

if TYPE_CHECKING:
    from dcr_s3.reports import PublishReport, PullReport

EXIT_CODES = """
Exit codes: 0 done, or nothing new. 2 wrong command line. 10 try again later. 11 start again from the newest version.
12 fix an argument, a permission or a file. 13 stored bytes are not what was committed: stop and look. 1 unexpected.
130 and 143: stopped by Ctrl-C or SIGTERM.
"""

app = typer.Typer(
    help="Publish policy versions to an S3 bucket as the bits that changed; pull them bit-exact.",
    epilog=EXIT_CODES,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dcr-s3 {installed_version('dcr-s3')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    pass


@app.command(epilog=EXIT_CODES)
def init(
    run: RunUrl,
    base: Annotated[Path, typer.Option("--base", metavar="DIR", help="Checkpoint directory that becomes version 0.")],
    upload_base: Annotated[bool, typer.Option("--upload-base", help="Also put the base in the bucket.")] = False,
    context_free: Annotated[
        bool, typer.Option("--context-free", help="Deltas that can be read without the old weights; a little larger.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Create a run from a checkpoint. Doing it again with the same checkpoint changes nothing."""
    from dcr_s3 import init_run

    with Output(as_json=as_json, quiet=quiet, verbose=verbose) as out:
        made = init_run(run, base, upload_base=upload_base, context=not context_free, progress=out.progress)
        data = {
            "run_id": made.run_id,
            "tensors": len(made.tensors),
            "total_elements": made.total_elements,
            "dense_bytes": made.dense_bytes,
            "state_digest": made.state,
            "coding": made.coding,
        }
        tensors = f"{len(made.tensors):,} tensors, {made.total_elements:,} elements, {size(made.dense_bytes)}"
        out.result(data, f"run {made.run_id}: {tensors}, state {made.state}")


@app.command(epilog=EXIT_CODES)
def publish(
    run: RunUrl,
    directory: Directory,
    step: Annotated[int | None, typer.Option("--step", help="Training step, for people.")] = None,
    base: Base = None,
    parts: Annotated[
        int, typer.Option("--parts", min=1, help="Cut matrices so that each of so many ranks fetches its own.")
    ] = 1,
    textfile: TextFile = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Publish a checkpoint as the run's next version."""
    from dcr_s3 import Sender
    from dcr_s3.cli.pulling import measured

    with (
        Output(as_json=as_json, quiet=quiet, verbose=verbose) as out,
        measured(run, "sender", textfile) as metrics,
        Sender.open(run, base=base, fence=False, parts=parts, progress=out.progress) as sender,
    ):
        report = sender.publish(directory, step=step)
        metrics.observe(report)
        out.result(report.model_dump(mode="json"), f"published {describe(report)}")


@app.command(epilog=EXIT_CODES)
def pull(
    run: RunUrl,
    directory: Mirror,
    base: Base = None,
    version: Annotated[
        int | None, typer.Option("--version", help="Stop at this version instead of the newest.")
    ] = None,
    nearby: Nearby = None,
    released_only: ReleasedOnly = False,
    cron: Annotated[
        bool, typer.Option("--cron", help="Say nothing unless something was pulled; a pull at work is as good as mine.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option("--timeout", metavar="SECONDS", min=0.1, help="Give up after that, with code 10.")
    ] = None,
    jitter: Annotated[
        float, typer.Option("--jitter", metavar="SECONDS", min=0, help="Wait a random time up to that first.")
    ] = 0.0,
    textfile: TextFile = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Bring a directory to the newest version. Costs one request where nothing is new."""
    from dcr_s3.cli.limits import spread, time_limit
    from dcr_s3.cli.pulling import measured, pull_once

    with (
        Output(as_json=as_json, quiet=quiet, verbose=verbose) as out,
        measured(run, "receiver", textfile) as metrics,
        time_limit(timeout),
    ):
        spread(jitter)
        report = pull_once(
            run,
            directory,
            base=base,
            nearby=nearby or [],
            to_version=version,
            skip_busy=cron,
            progress=out.progress,
            released_only=released_only,
        )
        if report is None:
            out.result({"busy": True})
            return
        metrics.observe(report)
        if cron and report.up_to_date:
            out.result(report.model_dump(mode="json"))
        else:
            nothing = f"nothing new: {directory} holds version {report.version}"
            out.result(report.model_dump(mode="json"), nothing if report.up_to_date else f"pulled {describe(report)}")


@app.command(epilog=EXIT_CODES)
def verify(
    run: RunUrl, directory: Directory, as_json: AsJson = False, quiet: Quiet = False, verbose: Verbose = 0
) -> None:
    """Read every tensor of a directory and prove that it is the version it claims to be."""
    from dcr_s3 import verify_directory

    with Output(as_json=as_json, quiet=quiet, verbose=verbose) as out:
        report = verify_directory(run, directory, progress=out.progress)
        proved = f"{directory} is version {report.version}, bit for bit: {report.tensors:,} tensors"
        out.result(report.model_dump(mode="json"), f"{proved}, state {report.state_digest}")


@app.command(epilog=EXIT_CODES)
def status(
    run: RunUrl,
    last: Newest = 20,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Show a run's versions, and what its receivers hold."""
    from dcr_s3.cli.tables import status_tables
    from dcr_s3.overview import overview
    from dcr_s3.store import open_store

    with Output(as_json=as_json, quiet=quiet, verbose=verbose) as out:
        found = overview(open_store(run), last=last)
        out.result(found.model_dump(mode="json"), *status_tables(found))


@app.command(epilog=EXIT_CODES)
def inspect(
    run: RunUrl,
    version: Annotated[
        int | None, typer.Argument(metavar="VERSION", help="Default: the newest.", show_default=False)
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Show what one version consists of: its manifest, segments, codings and where the changes are."""
    from dcr_s3.cli.tables import inspect_tables
    from dcr_s3.overview import anatomy
    from dcr_s3.store import open_store

    with Output(as_json=as_json, quiet=quiet, verbose=verbose) as out:
        found = anatomy(open_store(run), version)
        out.result(found.model_dump(mode="json"), *inspect_tables(found))


@app.command(epilog=EXIT_CODES)
def demo(
    steps: Annotated[int, typer.Option("--steps", min=1, help="Policy updates to publish.")] = 8,
    warmup_steps: Annotated[int, typer.Option("--warmup-steps", min=0, help="Pretraining steps before them.")] = 200,
    learning_rate: Annotated[float, typer.Option("--learning-rate", min=0.0)] = 1e-6,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Train a small language model here, publish every step to an embedded S3 server, follow with two processes."""
    from dcr_s3.cli.demo.board import step_table
    from dcr_s3.cli.demo.show import RECEIVERS, run_demo

    with Output(as_json=as_json, quiet=quiet, verbose=verbose) as out:
        outcome = run_demo(out, steps=steps, warmup_steps=warmup_steps, learning_rate=learning_rate)
        out.result(outcome.model_dump(mode="json"), step_table(outcome.steps, RECEIVERS), outcome.closing_lines())


def describe(report: PublishReport | PullReport) -> str:
    """One line about a version that was moved."""
    step = "" if report.step is None else f" (step {report.step})"
    changed = f"{report.changed_elements:,} of {report.total_elements:,} elements changed"
    share = percent(report.changed_elements, report.total_elements)
    less = ratio(report.dense_bytes, report.wire_bytes)
    moved = f"{size(report.wire_bytes)} instead of {size(report.dense_bytes)} ({less} less)"
    return f"version {report.version}{step}: {changed} ({share}), {moved}, {report.seconds['total']:.2f} s"
