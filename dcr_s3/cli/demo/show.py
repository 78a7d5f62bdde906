"""Runs the demonstration from end to end and shows it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import monotonic

from pydantic import BaseModel
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from safetensors.torch import save_file

from dcr_s3 import Sender, init_run
from dcr_s3.cli.demo.bits import checkpoint_bits, differing_tensors
from dcr_s3.cli.demo.board import Board, StepRow
from dcr_s3.cli.demo.fleet import Fleet
from dcr_s3.cli.demo.trainer import Trainer
from dcr_s3.cli.output import Output, ratio, size, stderr, stdout
from dcr_s3.cli.stopping import check_stopped
from dcr_s3.errors import StateMismatch
from dcr_s3.testing.servers import EmbeddedS3, LocalServer

RECEIVERS = ("receiver-a", "receiver-b")
_BUCKET = "demo"
_ARRIVAL_TIMEOUT_S = 120.0
_FENCE_VERSION = 1  # a sender that opens a run commits an empty version first


class DemoOutcome(BaseModel):
    """All steps, and the closing proof: mirrors compared with the trainer's last dense checkpoint, bit by bit."""

    parameters: int
    tensors: int
    steps: list[StepRow]
    mirrors_equal: bool
    bits: str
    seconds: float

    def closing_lines(self) -> str:
        """The proof in words."""
        wire, dense = sum(r.wire_bytes for r in self.steps), sum(r.dense_bytes for r in self.steps)
        exact = sum(r.exact is True for r in self.steps)
        return (
            f"Both mirrors equal the trainer's dense bf16 checkpoint in every bit of {self.tensors} tensors "
            f"({self.parameters:,} parameters, SHA-256 {self.bits[:16]}...):\n"
            f"compared after {exact} of {len(self.steps)} steps, and tensor by tensor at the end.\n"
            f"{size(wire)} were sent instead of {size(dense)} ({ratio(dense, wire)} less). Took {self.seconds:.0f} s."
        )


def run_demo(out: Output, *, steps: int, warmup_steps: int, learning_rate: float) -> DemoOutcome:
    """Trains, publishes, follows, proves. Raises ``StateMismatch`` if a mirror differs anywhere, at any version."""
    begun = monotonic()
    with tempfile.TemporaryDirectory(prefix="dcr-s3-demo-") as home_name, EmbeddedS3() as server, _settings(server):
        home = Path(home_name)
        trainer = Trainer(learning_rate=learning_rate)
        _pretrain(out, trainer, warmup_steps)
        base, dense = home / "base", home / "dense"
        _save(trainer, base)
        url = f"s3://{_BUCKET}/policy"
        init_run(url, base, upload_base=True, state_dir=home / "state")
        out.note(
            f"publishing to {url} on an embedded S3 server; {' and '.join(RECEIVERS)} follow in their own processes"
        )
        mirrors = [home / name for name in RECEIVERS]
        with Fleet(url, mirrors) as fleet, Sender.open(url, base=base, state_dir=home / "state") as sender:
            fleet.wait_for(_FENCE_VERSION, _ARRIVAL_TIMEOUT_S)
            board = Board(fleet)
            live = stdout.is_terminal and not out.as_json and not out.quiet
            with Live(get_renderable=board.render, console=stdout, transient=True) if live else nullcontext():
                for step in range(1, steps + 1):
                    _train_and_publish(trainer, sender, board, dense, step)
                fleet.wait_for(board.rows[-1].version, _ARRIVAL_TIMEOUT_S)
            board.refresh()
        _prove(board, mirrors, dense)
        return DemoOutcome(
            parameters=trainer.parameters,
            tensors=len(trainer.policy()),
            steps=board.rows,
            mirrors_equal=True,
            bits=checkpoint_bits(dense),
            seconds=monotonic() - begun,
        )


def _pretrain(out: Output, trainer: Trainer, steps: int) -> None:
    text = f"{size(len(trainer.text))} of Python's own documentation"
    out.note(f"pretraining a Llama-like model of {trainer.parameters:,} parameters on {text}: {steps} steps")
    columns = (TextColumn("pretraining"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    hidden = out.quiet or not stderr.is_terminal
    with Progress(*columns, console=stderr, transient=True, disable=hidden) as bar:
        task = bar.add_task("pretraining", total=steps, loss=0.0)
        trainer.pretrain(steps, lambda step, loss: bar.update(task, completed=step, loss=loss))


def _train_and_publish(trainer: Trainer, sender: Sender, board: Board, dense: Path, step: int) -> None:
    check_stopped()
    reward = trainer.reinforce().mean_reward
    begun = monotonic()
    with sender.version(step=step) as version:
        for name, tensor in trainer.policy().items():
            version.add(name, tensor)
    publish_seconds = monotonic() - begun
    _save(trainer, dense)
    bits = checkpoint_bits(dense)
    board.add(version.report, step=step, reward=reward, publish_seconds=publish_seconds, bits=bits)


def _save(trainer: Trainer, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    save_file(trainer.policy(), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(trainer.shape.config(), indent=2))


def _prove(board: Board, mirrors: list[Path], dense: Path) -> None:
    for row in board.rows:
        if row.exact is False:
            raise StateMismatch(
                f"version {row.version}: a mirror's bits are not those of the trainer's dense checkpoint"
            )
    for mirror in mirrors:
        wrong = differing_tensors(dense, mirror)
        if wrong:
            raise StateMismatch(
                f"{mirror.name}: {len(wrong)} tensors differ from the dense checkpoint, first {wrong[0]}"
            )


@contextmanager
def _settings(server: LocalServer) -> Iterator[None]:
    """Points this process, and those it starts, at the server, away from any real account it is set up for."""
    server.create_bucket(_BUCKET)
    before = dict(os.environ)
    for name in [name for name in before if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(server.environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
