"""Commands that look after a run: snapshots, folds, retention, releases."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from dcr_s3.cli.commands import EXIT_CODES, app
from dcr_s3.cli.options import (
    AsJson,
    Base,
    Directory,
    IfWorth,
    Mirror,
    Quiet,
    ReceiverNames,
    RunUrl,
    Verbose,
    Version,
)
from dcr_s3.cli.output import Output, percent, size
from dcr_s3.cli.tables import table

if TYPE_CHECKING:
    from dcr_s3.retention import GcReport


@app.command(epilog=EXIT_CODES)
def snapshot(
    run: RunUrl,
    directory: Directory,
    if_worth: IfWorth = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Publish the version that a mirror holds as a full checkpoint, so that new receivers need no longer chain."""
    from dcr_s3.upkeep import make_snapshot

    with Output(as_json=as_json, quiet=quiet, verbose=verbose) as out:
        report = make_snapshot(run, directory, if_worth=if_worth, progress=out.progress)
        made = f"snapshot of version {report.version}: {size(report.size_bytes)}"
        out.result(report.model_dump(mode="json"), made if report.made else f"none made of version {report.version}")


@app.command(epilog=EXIT_CODES)
def fold(
    run: RunUrl,
    directory: Mirror,
    base: Base = None,
    to_version: Annotated[int | None, typer.Option("--version", help="Fold up to this one, not the newest.")] = None,
    if_worth: IfWorth = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Bring a mirror to the newest version and publish all that changed as one delta."""
    from dcr_s3.upkeep import make_fold

    with Output(as_json=as_json, quiet=quiet, verbose=verbose) as out:
        report = make_fold(run, directory, base=base, to_version=to_version, if_worth=if_worth, progress=out.progress)
        moved = f"{size(report.fold_bytes)} instead of {size(report.chain_bytes)}"
        share = percent(report.fold_bytes, report.dense_bytes)
        made = f"folded versions {report.first} to {report.last}: {moved}, {share} of a full copy"
        out.result(report.model_dump(mode="json"), made if report.made else f"nothing folded at version {report.last}")


@app.command(epilog=EXIT_CODES)
def gc(
    run: RunUrl,
    delete: Annotated[bool, typer.Option("--delete", help="Do it; without this, only show what would go.")] = False,
    min_age: Annotated[float, typer.Option("--min-age", metavar="HOURS", min=0.0, help="Keep what is younger.")] = 24.0,
    keep_versions: Annotated[int, typer.Option("--keep-versions", min=1, help="Keep the newest deltas.")] = 16,
    uncommitted_only: Annotated[
        bool, typer.Option("--uncommitted-only", help="Only leftovers of attempts that were never committed.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Show, or delete, what no receiver that may exist needs any more."""
    from dcr_s3.retention import gc as collect
    from dcr_s3.store import open_store

    with Output(as_json=as_json, quiet=quiet, verbose=verbose) as out, closing(open_store(run)) as store:
        report = collect(
            store,
            min_age_s=3600 * min_age,
            keep_versions=keep_versions,
            uncommitted_only=uncommitted_only,
            dry_run=not delete,
        )
        done = "deleted" if report.deleted else "would be deleted (--delete does it)"
        count = len(report.objects) + len(report.uploads)
        out.result(
            report.model_dump(mode="json"), _doomed(report), f"{count:,} objects, {size(report.size_bytes)} {done}"
        )


@app.command(epilog=EXIT_CODES)
def wait(
    run: RunUrl,
    version: Version,
    receivers: ReceiverNames = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=0.0)] = 600.0,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Wait until receivers have proved a version. Names those that have not when the time is over."""
    from dcr_s3.joint import wait_for
    from dcr_s3.reading import load_run, read_position
    from dcr_s3.store import open_store

    with Output(as_json=as_json, quiet=quiet, verbose=verbose) as out, closing(open_store(run)) as store:
        position = read_position(store, load_run(store)[1], version)
        names = wait_for(store, position, receivers or None, timeout_s=timeout)
        out.result({"version": version, "proved_by": names}, f"version {version} is proved by {', '.join(names)}")


@app.command(epilog=EXIT_CODES)
def release(
    run: RunUrl,
    version: Version,
    receivers: ReceiverNames = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Release a version that receivers have proved, to those that apply only released ones. Never goes back."""
    from dcr_s3.joint import release as move
    from dcr_s3.reading import load_run, read_position
    from dcr_s3.store import open_store

    with Output(as_json=as_json, quiet=quiet, verbose=verbose) as out, closing(open_store(run)) as store:
        moved = move(store, read_position(store, load_run(store)[1], version), receivers or None)
        out.result(moved.model_dump(mode="json"), f"version {moved.version} is released")


@app.command(epilog=EXIT_CODES)
def leave(
    run: RunUrl, name: Annotated[str, typer.Argument(metavar="NAME", help="The receiver's name, as status shows it.")]
) -> None:
    """Take a receiver that will not come back out of a run: nobody waits for it, nothing is kept for it."""
    from dcr_s3.format.keys import ack_key
    from dcr_s3.store import open_store

    with closing(open_store(run)) as store:
        store.delete([ack_key(name)])


def _doomed(report: GcReport) -> Table:
    """One line for each reason."""
    made = table("not needed any more", "objects", "bytes", "<why")
    reasons = [(d.why, d.size_bytes) for d in [*report.objects, *report.uploads]]
    for why in dict.fromkeys(why for why, _ in reasons):
        sizes = [size_bytes for one, size_bytes in reasons if one == why]
        made.add_row(f"{len(sizes):,}", size(sum(sizes)), why)
    return made
