"""The plan command: seconds, bytes and dollars before anything is rented."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcr_s3.cli.commands import EXIT_CODES, app
from dcr_s3.cli.options import AsJson, Quiet, Verbose
from dcr_s3.cli.output import Output, size
from dcr_s3.cli.tables import table

if TYPE_CHECKING:
    from rich.table import Table

    from dcr_s3.planning.model import Costs, Refit, Workload
    from dcr_s3.planning.rates import Rates

_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
PUBLISHED_BITS = 12.5
"""Bits per change of the published sparse codec with 16-bit gaps (12.0 to 13.0)."""


@app.command(epilog=EXIT_CODES)
def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Parameters (30B, 1T) or a checkpoint directory.")],
    changed: Annotated[float, typer.Option("--changed", help="Percent of elements that a version changes.")] = 1.0,
    cell_bytes: Annotated[int, typer.Option("--bytes", help="Bytes of a parameter.")] = 2,
    owners: Annotated[int, typer.Option("--owners", min=1, help="Trainer nodes that send.")] = 1,
    receivers: Annotated[int, typer.Option("--receivers", min=1, help="Rollout nodes.")] = 1,
    sharded: Annotated[bool, typer.Option("--sharded", help="Each rollout node fetches its own part only.")] = False,
    regions: Annotated[
        int, typer.Option("--regions", min=1, help="Regions with receivers, the bucket's included.")
    ] = 1,
    up_gbit: Annotated[float, typer.Option("--up", metavar="GBIT/S", help="Link of a trainer node.")] = 5.0,
    down_gbit: Annotated[float, typer.Option("--down", metavar="GBIT/S", help="Link of a rollout node.")] = 5.0,
    latency_ms: Annotated[float, typer.Option("--latency-ms", help="Of a small request; doctor measures it.")] = 20.0,
    cores: Annotated[int, typer.Option("--cores", min=1, help="Cores of a node that may be used.")] = 16,
    steps_per_day: Annotated[float, typer.Option("--steps-per-day")] = 288.0,
    rates_file: Annotated[
        Path | None,
        typer.Option("--rates", metavar="FILE", help="Rates of one core; measured and kept there if absent."),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Predict a refit's seconds, bytes, requests and dollars, against full copies and the published sparse codec."""
    from dcr_s3.planning.model import Prices, Workload, costs, predict, predict_full_copy

    with Output(as_json=as_json, quiet=quiet, verbose=verbose) as out:
        rates = _read_rates(rates_file, out)
        work = Workload(
            dense_bytes=_dense_bytes(model, cell_bytes),
            cell_bytes=cell_bytes,
            changed_ratio=changed / 100,
            owners=owners,
            receivers=receivers,
            regions=regions,
            sharded=sharded,
            up_bytes_per_s=up_gbit * 1e9 / 8,
            down_bytes_per_s=down_gbit * 1e9 / 8,
            latency_s=latency_ms / 1000,
            owner_cores=cores,
            receiver_cores=cores,
            steps_per_day=steps_per_day,
        )
        published = work.model_copy(update={"bits_per_change": PUBLISHED_BITS})
        ways = {
            "delta": predict(work, rates),
            "published sparse codec": predict(published, rates),
            "full copy": predict_full_copy(work),
        }
        prices = {name: costs(work, refit, Prices()) for name, refit in ways.items()}
        data = {
            name: {**refit.model_dump(), **prices[name].model_dump()} for name, refit in ways.items()
        }  # fmt: skip
        line = (
            f"{size(work.dense_bytes)}, {changed:g} % changed, {owners} x {up_gbit:g} Gbit/s up, {receivers} nodes down"
        )
        out.result({"workload": work.model_dump(), "ways": data}, line, _shown(work, ways, prices))


def _shown(work: Workload, ways: dict[str, Refit], prices: dict[str, Costs]) -> Table:
    shown = table(
        "a refit, as predicted", "<way", "seconds", "bytes", "<bound by", "PUT", "GET", "$ a step", "$ a day", "<stages"
    )
    for name, refit in ways.items():
        cost = prices[name]
        stages = ", ".join(f"{k} {s:.2f}" for k, s in refit.seconds.items() if k != "total" and s >= 0.005)
        shown.add_row(
            name,
            f"{refit.seconds['total']:.2f}",
            size(refit.wire_bytes),
            refit.bound_by,
            f"{cost.put_requests:,}",
            f"{cost.get_requests:,}",
            f"{cost.dollars_per_step:.4f}",
            f"{cost.dollars_per_day:.2f}",
            stages,
        )
    return shown


def _dense_bytes(model: str, cell_bytes: int) -> int:
    """Of a parameter count like 30B, or of a checkpoint's tensors. Raises ``BadInput``."""
    from dcr_s3.errors import BadInput
    from dcr_s3.targets.checkpoint import Checkpoint

    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBGT])", model.upper())
    if match:
        return int(float(match[1]) * _UNITS[match[2]] * cell_bytes)
    path = Path(model)
    if not path.exists():
        raise BadInput(f"{model} is neither a number of parameters, like 30B, nor a checkpoint directory")
    return sum(place.size_bytes for place in Checkpoint.open(path).places.values())


def _read_rates(path: Path | None, out: Output) -> Rates:
    """Rates from a file; measured here and kept in it if there is none yet; the usual ones without a file."""
    from dcr_s3.planning.rates import Rates, measure_rates

    if path is None:
        return Rates()
    if path.exists():
        return Rates.from_bytes(path.read_bytes(), where=str(path))
    out.note(f"measuring this machine's rates, for {path}")
    rates = measure_rates()
    path.write_bytes(rates.to_bytes())
    return rates
