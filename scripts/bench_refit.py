#!/usr/bin/env python3
"""The headline: seconds from the first scan to proven residence at the last receiver, against full copies.

A real S3 server (SeaweedFS) on this machine, behind one slow link for the sender and one for each receiver; sender and
receivers are processes of their own. The weights are a checkpoint repeated to the wanted size. Measured are

    delta      this package, receivers following
    unpiped    this package, each receiver pulling once the version is committed
    gaps       the same pipeline with 16-bit gaps, XOR values and zstd -1 in place of the coding
    full       a full copy: uploaded, then downloaded
    stream     a full copy, compressed (byte planes, zstd -1), uploaded and downloaded piece by piece at once

    .venv/bin/python scripts/bench_refit.py --size-mb 1096 --mbit 100 --plot figure.png --json results.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dcr_s3.testing.proxy import FaultyProxy
from dcr_s3.testing.servers import SeaweedServer

HERE = Path(__file__).resolve().parent
BUCKET = "bench"


class Worker:
    """A process that takes one JSON command a line and answers with one JSON line."""

    def __init__(self, role: str, environment: dict[str, str], *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "lib" / "bench_worker.py"), role, *map(str, arguments)],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, **command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("a worker ended; its error is above")
        return json.loads(line)

    def ask(self, **command: Any) -> dict[str, Any]:
        self.tell(**command)
        return self.hear()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=120)


class Bench:
    """The server, a link for each node, and what was measured."""

    def __init__(self, arguments: argparse.Namespace, home: Path, stack: ExitStack) -> None:
        self.home = home
        self._arguments = arguments
        server = stack.enter_context(SeaweedServer())
        server.create_bucket(BUCKET)
        self._server = server
        self._links = [self._link(stack) for _ in range(1 + max([1, *arguments.receivers]))]
        self._runs = 0

    def _link(self, stack: ExitStack) -> FaultyProxy:
        rate = self._arguments.mbit * 1e6 / 8
        delay_s = self._arguments.delay_ms / 1000
        return stack.enter_context(FaultyProxy(self._server.endpoint_url, bytes_per_s=rate, latency_s=delay_s))

    @contextmanager
    def workers(self, receivers: int, coding: str, follow: bool) -> Iterator[tuple[Worker, list[Worker]]]:
        """A sender and receivers of a new run, all at version 0."""
        self._runs += 1
        name = f"run-{self._runs}"
        url = f"s3://{BUCKET}/{name}"
        base = self.home / "base"
        environment = {**self._server.environment, "DCR_STATE_DIR": str(self.home / name / "state")}
        nodes = [{**environment, "AWS_ENDPOINT_URL_S3": link.endpoint_url} for link in self._links[: 1 + receivers]]
        sender = Worker("sender", nodes[0], url, base, coding, self._arguments.trace)
        sender.hear()
        pulls = [
            Worker("receiver", node, url, base, coding, self.home / name / f"mirror-{n}", int(follow))
            for n, node in enumerate(nodes[1:])
        ]
        for worker in pulls:
            worker.hear()
        try:
            yield sender, pulls
        finally:
            for worker in (sender, *pulls):
                worker.close()
            shutil.rmtree(self.home / name, ignore_errors=True)

    def refits(
        self, changes: Sequence[str], receivers: int = 1, coding: str = "clock", follow: bool = True
    ) -> dict[str, Any]:
        """For each kind of change the best of some refits. At the end every mirror is compared bit for bit."""
        with self.workers(receivers, coding, follow) as (sender, pulls):
            found = {changed: self._refit(changed, sender, pulls, follow) for changed in changes}
            digests = {pull.ask(act="digest")["sha256"] for pull in pulls} | {sender.ask(act="digest")["sha256"]}
            if len(digests) != 1:
                sys.exit("a mirror differs from what was published")
        return found

    def _refit(self, changed: str, sender: Worker, pulls: list[Worker], follow: bool) -> dict[str, Any]:
        results = []
        for _ in range(self._arguments.tries):
            sender.ask(act="prepare", changed=changed)
            sent = sender.ask(act="publish")
            if not follow:
                for pull in pulls:
                    pull.tell(act="pull")
            got = [pull.hear() for pull in pulls]
            seconds = max(g["applied_at"] for g in got) - sent["begun_at"]
            results.append({"seconds": seconds, "sent": sent, "got": got})
        best = min(results, key=lambda r: r["seconds"])
        sent = best["sent"]
        return {
            "seconds": best["seconds"],
            "all_seconds": [r["seconds"] for r in results],
            "wire_bytes": sent["wire_bytes"],
            "changed_ratio": sent["changed_elements"] / sent["total_elements"],
            "bits_per_change": 8 * sent["wire_bytes"] / max(sent["changed_elements"], 1),
            "publish": sent["seconds"],
            "pull": best["got"][0]["seconds"],
        }

    def full_copy(self, streamed: bool) -> dict[str, Any]:
        """A full copy through the same links."""
        with self.workers(1, "clock", True) as (sender, (receiver,)):
            receiver.ask(act="stop")
            sender.ask(act="prepare", changed="0.03")
            if streamed:
                receiver.tell(act="copy-streamed")
            sent = sender.ask(act="copy-streamed" if streamed else "copy")
            if not streamed:
                receiver.tell(act="copy")
            got = receiver.hear()
            if receiver.ask(act="digest")["sha256"] != sender.ask(act="digest")["sha256"]:
                sys.exit("the full copy differs from what was sent")
        seconds = got["applied_at"] - sent["begun_at"]
        return {"seconds": seconds, "wire_bytes": sent["wire_bytes"], "upload_s": sent["ended_at"] - sent["begun_at"]}


def measure(bench: Bench, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything, one after the other."""
    say = Console(stderr=True).print
    found: dict[str, Any] = {"receivers": {}}
    if not arguments.no_full:
        say("full copies")
        found["stream"] = bench.full_copy(streamed=True)
        found["full"] = bench.full_copy(streamed=False)
    for name, options in (("delta", {}), ("unpiped", {"follow": False}), ("gaps", {"coding": "gaps"})):
        say(f"{name}: changed {', '.join(arguments.changed)}")
        found[name] = bench.refits(arguments.changed, **options)
    for count in arguments.receivers:
        say(f"{count} receivers")
        found["receivers"][str(count)] = bench.refits(arguments.changed[:1], receivers=count)[arguments.changed[0]]
    return found


def show(found: dict[str, Any], dense_bytes: int, arguments: argparse.Namespace) -> None:
    """Tables for people."""
    title = f"{dense_bytes / 1e6:.0f} MB of bf16, {arguments.mbit:g} Mbit/s and {arguments.delay_ms:g} ms for each node"
    table = Table(title=title, title_justify="left", box=None)
    full, stream = found.get("full"), found.get("stream")
    for name in ("changed", "bits/change", "MB", "seconds", "x full", "x stream", "x gaps", "unpiped", "stages"):
        table.add_column(name, justify="left" if name == "stages" else "right")
    for changed, delta in found["delta"].items():
        stages = {**delta["publish"], **{f"pull {k}": v for k, v in delta["pull"].items()}}
        table.add_row(
            f"{100 * delta['changed_ratio']:.2f} %",
            f"{delta['bits_per_change']:.2f}",
            f"{delta['wire_bytes'] / 1e6:.2f}",
            f"{delta['seconds']:.2f}",
            f"{full['seconds'] / delta['seconds']:.0f}" if full else "",
            f"{stream['seconds'] / delta['seconds']:.0f}" if stream else "",
            f"{found['gaps'][changed]['seconds'] / delta['seconds']:.2f}",
            f"{found['unpiped'][changed]['seconds']:.2f} s",
            ", ".join(f"{k} {v:.2f}" for k, v in stages.items() if "total" not in k and v >= 0.005),
        )
    console = Console(width=200)
    console.print(table)
    for name in ("full", "stream"):
        if found.get(name):
            console.print(f"{name}: {found[name]['seconds']:.1f} s, {found[name]['wire_bytes'] / 1e6:.0f} MB")
    for count, one in found["receivers"].items():
        console.print(f"{count} receivers, {100 * one['changed_ratio']:.2f} % changed: {one['seconds']:.2f} s")


def plot(found: dict[str, Any], dense_bytes: int, arguments: argparse.Namespace) -> None:
    """Seconds by way of copying, on a logarithmic scale."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.6), layout="constrained")
    names, seconds, colours = ["full copy", "full copy, streamed and compressed"], [], ["#8a8f98", "#8a8f98"]
    seconds = [found["full"]["seconds"], found["stream"]["seconds"]]
    for changed, delta in found["delta"].items():
        share = f"{100 * delta['changed_ratio']:.2g} % changed" + (", real" if changed == "real" else "")
        names += [f"{share}: gaps + XOR + zstd", f"{share}: dcr_s3"]
        seconds += [found["gaps"][changed]["seconds"], delta["seconds"]]
        colours += ["#c9a227", "#1769aa"]
    bars = axes.barh(names, seconds, color=colours)
    axes.bar_label(bars, [f"{s:.1f} s  ({seconds[0] / s:.0f}x)" for s in seconds], padding=3, fontsize=9)
    axes.set_xscale("log")
    axes.set_xlim(min(seconds) / 2, max(seconds) * 4)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    setting = f"{dense_bytes / 1e6:.0f} MB of bf16, {arguments.mbit:g} Mbit/s for each node"
    axes.set_xlabel("seconds from the first scan to proven residence")
    axes.set_title(setting, loc="left", fontsize=10)
    figure.savefig(arguments.plot, dpi=150)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mb", type=int, default=1096, help="in copies of the trace's base, 68.5 MB each")
    parser.add_argument("--mbit", type=float, default=100.0, help="of each node's link, each way")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="of each request")
    parser.add_argument("--changed", nargs="+", default=["real", "0.01", "0.03", "0.05"], help="real first")
    parser.add_argument("--receivers", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument("--tries", type=int, default=2)
    parser.add_argument("--trace", type=Path, default=HERE.parents[1] / "shared" / "trace")
    parser.add_argument("--no-full", action="store_true", help="leave the full copies out")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="dcr-s3-bench-") as home_name, ExitStack() as stack:
        home = Path(home_name)
        subprocess.run(
            [sys.executable, HERE / "lib" / "bench_worker.py", "base", home / "base", str(arguments.size_mb),
             arguments.trace],
            check=True,
        )  # fmt: skip
        dense_bytes = sum(f.stat().st_size for f in (home / "base").glob("*.safetensors"))
        begun = time.monotonic()
        found = measure(Bench(arguments, home, stack), arguments)
        found |= {"dense_bytes": dense_bytes, "mbit": arguments.mbit, "delay_ms": arguments.delay_ms}
        show(found, dense_bytes, arguments)
        print(f"measured in {time.monotonic() - begun:.0f} s")
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
        if arguments.plot and "full" in found:
            plot(found, dense_bytes, arguments)


if __name__ == "__main__":
    main()
