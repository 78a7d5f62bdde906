"""The command that keeps a directory or a serving engine at the newest version."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dcr_s3.cli.commands import EXIT_CODES, app, describe
from dcr_s3.cli.options import (
    AsJson,
    Base,
    MetricsPort,
    Nearby,
    PollInterval,
    Quiet,
    ReleasedOnly,
    RunUrl,
    UntilVersion,
    Verbose,
)
from dcr_s3.cli.output import Output, size
from dcr_s3.cli.stopping import stop_by_event

if TYPE_CHECKING:
    from dcr_s3.reports import PullReport


@app.command(epilog=EXIT_CODES)
def follow(
    run: RunUrl,
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Checkpoint directory to keep up to date; not with --vllm.")
    ] = None,
    base: Base = None,
    poll_interval: PollInterval = 2.0,
    until_version: UntilVersion = None,
    nearby: Nearby = None,
    released_only: ReleasedOnly = False,
    name: Annotated[
        str | None, typer.Option("--name", help="What is acknowledged under; default: from host and DIR or URL.")
    ] = None,
    no_ack: Annotated[bool, typer.Option("--no-ack", help="Write nothing at RUN: be no member of it.")] = False,
    metrics_port: MetricsPort = None,
    vllm: Annotated[str | None, typer.Option("--vllm", metavar="URL", help="A vLLM server to keep up to date.")] = None,
    sglang: Annotated[
        str | None, typer.Option("--sglang", metavar="URL", help="An SGLang server that serves from DIR.")
    ] = None,
    mode: Annotated[
        Literal["asynchronous", "synchronous"],
        typer.Option("--mode", help="With --vllm: requests run while a version is staged, or wait for all of it."),
    ] = "asynchronous",
    pause: Annotated[
        Literal["wait", "keep", "abort"],
        typer.Option("--pause", help="What running requests do: finish first, go on with new weights, or end."),
    ] = "wait",
    verify: Annotated[
        Literal["off", "written", "full"],
        typer.Option("--verify", help="With --vllm: what is read back before requests run again."),
    ] = "written",
    pause_limit: Annotated[
        float, typer.Option("--pause-limit", metavar="SECONDS", help="With --vllm: undo what takes longer to write.")
    ] = 30.0,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Keep a directory, or a serving engine, at the newest version.

    Ctrl-C or SIGTERM ends it after the version in hand, SIGHUP begins anew.

    With --json, one object at the end: the sums over all pulls, and the last pull's own report.
    """
    from dcr_s3.cli.engines import one_target, sglang_stretch, vllm_stretch
    from dcr_s3.cli.pulling import Following, directory_stretch, follow_as_service
    from dcr_s3.metrics import Metrics

    sums = {"pulls": 0, "changed_elements": 0, "wire_bytes": 0}
    last: PullReport | None = None
    with Output(as_json=as_json, quiet=quiet, verbose=verbose) as out, stop_by_event() as stop:
        one_target(directory, vllm, sglang, mode=mode, pause=pause, verify=verify)
        wanted = Following(
            run=run,
            base=base,
            nearby=tuple(nearby or ()),
            released_only=released_only,
            name=name,
            acknowledge=not no_ack,
            until_version=until_version,
            poll_interval_s=poll_interval,
            stop=stop,
        )
        if vllm is not None:
            stretch = vllm_stretch(wanted, vllm, mode=mode, pause_mode=pause, verify=verify, pause_limit_s=pause_limit)
        else:
            assert directory is not None
            if sglang is not None:
                stretch = sglang_stretch(wanted, directory, sglang, abort=pause == "abort")
            else:
                stretch = directory_stretch(wanted, directory)

        def on_pull(report: PullReport) -> None:
            nonlocal last
            metrics.observe(report)
            if report.up_to_date:
                out.note(f"holds version {report.version}")
                return
            last = report
            sums["pulls"] += 1
            sums["changed_elements"] += report.changed_elements
            sums["wire_bytes"] += report.wire_bytes
            out.note(f"pulled {describe(report)}")

        metrics = Metrics(run, "receiver")
        if metrics_port is not None:
            metrics.serve(metrics_port)
        follow_as_service(wanted, stretch, on_pull=on_pull, progress=out.progress)
        if not stop.is_set():
            data = {
                "version": last.version if last else None,
                **sums,
                "last": last.model_dump(mode="json") if last else None,
            }
            out.result(data, f"followed: {sums['pulls']} pulls, {size(sums['wire_bytes'])} received")
