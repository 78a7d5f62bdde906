"""Commands that look into a serving engine, and how one is kept at a run's version."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dcr_s3.cli.commands import EXIT_CODES, app
from dcr_s3.cli.options import AsJson, Quiet, RunUrl, Verbose
from dcr_s3.cli.output import Output
from dcr_s3.errors import BadInput

if TYPE_CHECKING:
    from dcr_s3.cli.pulling import Following, OnPull, Stretch
    from dcr_s3.reports import PullReport
    from dcr_s3.resident import ResidentReceiver
    from dcr_s3.store import Store
    from dcr_s3.vllm.channels import PauseMode
    from dcr_s3.workers import Progress

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


def vllm_receiver(run: str, url: str, base: str | None) -> tuple[ResidentReceiver, Any]:
    """A receiver for the engine behind a vLLM server, and the channel to its ranks."""
    from dcr_s3.resident import ResidentReceiver
    from dcr_s3.vllm.channels import HttpRanks

    ranks = HttpRanks(url)
    return ResidentReceiver(run, ranks, base or "", gate=ranks), ranks


def vllm_stretch(wanted: Following, url: str, *, pause_mode: PauseMode, **options: Any) -> Stretch:
    """Keeps the engine behind a vLLM server up to date; ``options`` are of :class:`ResidentReceiver`."""
    from dcr_s3.receiver import default_name
    from dcr_s3.resident import ResidentReceiver
    from dcr_s3.vllm.channels import HttpRanks

    def stretch(store: Store, on_pull: OnPull, progress: Progress) -> None:
        ranks = HttpRanks(url, pause_mode=pause_mode)
        receiver = ResidentReceiver(
            wanted.run,
            ranks,
            str(wanted.base) if wanted.base is not None else "",
            gate=ranks,
            name=(wanted.name or default_name(ranks.url)) if wanted.acknowledge else None,
            released_only=wanted.released_only,
            nearby=wanted.nearby,
            store=store,
            progress=progress,
            **options,
        )
        receiver.follow(
            on_pull, wanted.stop, until_version=wanted.until_version, poll_interval_s=wanted.poll_interval_s
        )

    return stretch


def sglang_stretch(wanted: Following, directory: Path, url: str, *, abort: bool) -> Stretch:
    """Keeps a directory up to date and has an SGLang server load it after every version."""
    from dcr_s3.cli.pulling import directory_receiver
    from dcr_s3.sglang import SglangServer, serve_patiently

    def stretch(store: Store, on_pull: OnPull, progress: Progress) -> None:
        server = SglangServer(url, directory, abort=abort)

        def serve(report: PullReport) -> None:
            if serve_patiently(server, report.version, wanted.stop, interval_s=wanted.poll_interval_s):
                on_pull(report)

        directory_receiver(wanted, directory, store, progress).follow(
            serve,
            wanted.stop,
            until_version=wanted.until_version,
            poll_interval_s=wanted.poll_interval_s,
            report_held=True,
        )

    return stretch


def one_target(
    directory: Path | None, vllm: str | None, sglang: str | None, *, mode: str, pause: str, verify: str
) -> None:
    """Raises ``BadInput`` unless the options say exactly one thing to follow with, and nothing that it cannot do."""
    if vllm is not None and (directory is not None or sglang is not None):
        raise BadInput("--vllm keeps no directory and excludes --sglang; give one of them")
    if vllm is None and directory is None:
        raise BadInput(
            "say what to keep up to date: a directory DIR, with --sglang URL the server that serves it, or --vllm URL"
        )
    if vllm is None and (mode != "asynchronous" or verify != "written"):
        raise BadInput("--mode and --verify are for --vllm: only there is an engine written to in place")
    if (sglang is not None and pause == "keep") or (sglang is None and vllm is None and pause != "wait"):
        raise BadInput(f"--pause {pause} is for --vllm; an SGLang server can be told to wait or to abort")


def _counts(routes: dict[str, int]) -> str:
    return ", ".join(f"{count} {route}" for route, count in routes.items() if count)
