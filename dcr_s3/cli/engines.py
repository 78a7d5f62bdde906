"""Commands that keep a serving engine at a run's version, or look into one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dcr_s3.cli.commands import EXIT_CODES, app
from dcr_s3.cli.options import AsJson, Quiet, RunUrl, Verbose
from dcr_s3.cli.output import Output
from dcr_s3.errors import BadInput

if TYPE_CHECKING:
    from dcr_s3.reports import PullReport
    from dcr_s3.resident import ResidentReceiver, ResidentReport

Vllm = Annotated[str, typer.Option("--vllm", metavar="URL", help="Address of the vLLM server.")]
EngineBase = Annotated[
    str | None,
    typer.Option("--base", metavar="DIR", help="Checkpoint that the engine was started from; default: its model."),
]


@app.command(epilog=EXIT_CODES)
def bind(
    run: RunUrl,
    vllm: Vllm,
    base: EngineBase = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show every tensor, not only those out of the ordinary.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Show how every tensor of a run gets into an engine, and why; prove which version the engine holds."""
    with Output(as_json=as_json, quiet=quiet, verbose=verbose) as out:
        receiver, ranks = vllm_receiver(run, vllm, base)
        version = receiver.open()
        explained = ranks.call("explain")
        routes = Table("rank", "tensor", "route", "blocks", "into", "why")
        for rank, tensors in enumerate(explained):
            for tensor in tensors:
                if explain or tensor["route"] != "planned":
                    into = ", ".join(tensor["into"][:2])
                    routes.add_row(
                        str(rank), tensor["name"], tensor["route"], str(tensor["blocks"]), into, tensor["reason"]
                    )
        data = {"version": version, "routes": receiver.routes, "ranks": explained if explain else None}
        counts = "; ".join(f"rank {n}: {_counts(c)}" for n, c in enumerate(receiver.routes))
        out.result(data, *([routes] if routes.row_count else []), f"the engine holds version {version}. {counts}")


@app.command(epilog=EXIT_CODES)
def resident(
    run: RunUrl,
    vllm: Vllm,
    base: EngineBase = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Prove from an engine's own memory, all ranks together, which version of the run it holds."""
    with Output(as_json=as_json, quiet=quiet, verbose=verbose) as out:
        receiver, _ = vllm_receiver(run, vllm, base)
        receiver.open()
        report = receiver.verify()
        out.result(
            report.model_dump(mode="json"), f"the engine holds version {report.version}, state {report.state_digest}"
        )


def vllm_receiver(run: str, url: str, base: str | None, **options: Any) -> tuple[ResidentReceiver, Any]:
    """A receiver for the engine behind a vLLM server, and the channel to its ranks."""
    from dcr_s3.resident import ResidentReceiver
    from dcr_s3.vllm.channels import HttpRanks

    ranks = HttpRanks(url)
    return ResidentReceiver(run, ranks, base or ranks.model(), gate=ranks, **options), ranks


def follow_vllm(
    run: str,
    url: str,
    base: Path | None,
    out: Output,
    stop: threading.Event,
    until_version: int | None,
    poll_interval_s: float,
) -> None:
    """Follows with a vLLM server and says what was done."""
    reports: list[ResidentReport] = []

    def on_version(report: ResidentReport) -> None:
        reports.append(report)
        out.note(f"version {report.version}: {report.changed_elements:,} elements, paused for {report.pause_s:.3f} s")

    receiver, _ = vllm_receiver(run, url, str(base) if base is not None else None)
    receiver.follow(on_version, stop, until_version=until_version, poll_interval_s=poll_interval_s)
    if not stop.is_set():
        data = {
            "version": receiver.version,
            "versions": len(reports),
            "wire_bytes": sum(r.wire_bytes for r in reports),
            "pause_s": [r.pause_s for r in reports],
        }
        out.result(data, f"followed: {len(reports)} versions; the engine serves version {receiver.version}")


def follow_sglang(
    run: str,
    url: str,
    directory: Path,
    base: Path | None,
    out: Output,
    stop: threading.Event,
    until_version: int | None,
    poll_interval_s: float,
) -> None:
    """Keeps a directory up to date and has an SGLang server load it after every version."""
    from dcr_s3 import Receiver
    from dcr_s3.sglang import SglangServer, serve_patiently

    server = SglangServer(url, directory)
    served: list[int] = []

    def serve(report: PullReport) -> None:
        if serve_patiently(server, report.version, stop, interval_s=poll_interval_s):
            served.append(report.version)
            out.note(f"{url} serves version {report.version}")

    receiver = Receiver(run, directory, base=base, progress=out.progress)
    serve(receiver.pull(to_version=until_version))
    receiver.follow(serve, stop, until_version=until_version, poll_interval_s=poll_interval_s)
    if not stop.is_set():
        data = {"version": served[-1], "versions": len(served)}
        out.result(data, f"followed: {len(served)} versions; the server serves version {served[-1]}")


def one_target(directory: Path | None, vllm: str | None, sglang: str | None) -> None:
    """Raises ``BadInput`` unless the options say exactly one thing to follow with."""
    if vllm is not None and (directory is not None or sglang is not None):
        raise BadInput("--vllm keeps no directory and excludes --sglang; give one of them")
    if vllm is None and directory is None:
        raise BadInput(
            "say what to keep up to date: a directory DIR, with --sglang URL the server that serves it, or --vllm URL"
        )


def _counts(routes: dict[str, int]) -> str:
    return ", ".join(f"{count} {route}" for route, count in routes.items() if count)
