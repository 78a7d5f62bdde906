"""Arguments and options that mean the same wherever a command takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunUrl = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Address of the run: s3://bucket/prefix. Credentials and endpoint as for AWS."),
]
Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint directory with safetensors files.")]
Mirror = Annotated[
    Path, typer.Argument(metavar="DIR", help="Checkpoint directory to bring up to date; made if there is none.")
]
Version = Annotated[int, typer.Argument(metavar="VERSION")]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors (and JSON, if asked for).")]
Verbose = Annotated[int, typer.Option("--verbose", "-v", count=True, help="Log to stderr; twice for more.")]

Base = Annotated[Path | None, typer.Option("--base", metavar="DIR", help="Checkpoint directory of version 0.")]
Nearby = Annotated[
    list[str] | None,
    typer.Option("--nearby", metavar="URL", help="A relay's copy of the run to read from first; may be repeated."),
]
ReleasedOnly = Annotated[
    bool, typer.Option("--released-only", help="Apply a version only once it is released (see release).")
]
PollInterval = Annotated[
    float, typer.Option("--poll-interval", metavar="SECONDS", min=0.01, help="How often to look for a new version.")
]
UntilVersion = Annotated[int | None, typer.Option("--until-version", help="End when this version is there.")]
TextFile = Annotated[
    Path | None, typer.Option("--textfile", metavar="FILE", help="Leave Prometheus metrics for node_exporter.")
]
MetricsPort = Annotated[int | None, typer.Option("--metrics-port", help="Serve Prometheus metrics there, on loopback.")]
Newest = Annotated[int, typer.Option("--last", min=1, help="How many of the newest versions to show.")]
IfWorth = Annotated[
    float | None,
    typer.Option("--if-worth", metavar="SHARE", min=0.0, help="Only if the chain takes more than this part of it."),
]
ReceiverNames = Annotated[
    list[str] | None,
    typer.Option("--receiver", metavar="NAME", help="May be repeated; default: every member whose lease runs."),
]
