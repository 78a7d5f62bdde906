"""A trainer of several ranks: each a process of its own, all owners of one run, joined by a network of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dcr_s3.errors import BadInput, CommitConflict, DcrError, Fenced, NotAcknowledged, OwnerFailed, RetryError
from dcr_s3.joint import release
from dcr_s3.mapping.group import Group
from dcr_s3.mapping.part import Part, Shard
from dcr_s3.mapping.read import Reader
from dcr_s3.mapping.view import View
from dcr_s3.reading import load_run, read_position
from dcr_s3.reports import PublishReport
from dcr_s3.sender import Sender
from dcr_s3.testing.sim.model import TinyModel
from dcr_s3.testing.sim.programs import Program, Surroundings
from dcr_s3.testing.sim.truth import Intent
from dcr_s3.training.joining import Settings, join
from dcr_s3.training.plan import Plan, by_key
from dcr_s3.world import world

TIMEOUT_S = 60.0
LOOK_S = 0.5
_TORCH = {"BF16": torch.bfloat16, "F32": torch.float32}


@dataclass(eq=False)
class Meeting:
    """What one generation of ranks has said to each other, by turn and rank; ``over`` once a rank is missing."""

    answers: dict[int, dict[int, Any]] = field(default_factory=dict)
    intents: list[Intent] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)
    over: bool = False


class SimGroup(Group):
    """The collectives of one rank, in virtual time."""

    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._meeting = meeting
        self._turn = 0

    def gather(self, item: Any) -> list[Any]:
        answers = self._meeting.answers.setdefault(self._turn, {})
        self._turn += 1
        answers[self.rank] = json.loads(json.dumps(item))
        deadline = world().monotonic() + TIMEOUT_S
        while len(answers) < self.size:
            if self._meeting.over or world().monotonic() > deadline:
                raise OwnerFailed("not all ranks of the trainer answered; one may be dead")
            world().sleep(LOOK_S)
        return [answers[rank] for rank in range(self.size)]

    def sums(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        total = np.zeros_like(values)
        for answer in self.gather(values.tolist()):
            total += np.array(answer, np.uint64)
        return total

    def close(self) -> None:
        """Nothing to let go of."""


@dataclass(eq=False)
class Job:
    """All ranks publish states in their order, and again from the one before after any of them was lost.

    ``state_dir`` is where the first rank rebuilds a baseline; all are on one machine.
    """

    states: int
    size: int
    state_dir: Path
    reached: int = 0
    done: bool = False
    meeting: Meeting = field(default_factory=Meeting)
    _present: set[int] = field(default_factory=set)

    def enter(self, rank: int) -> Meeting:
        """A rank joins, as a launcher starts it. Where it was here already, all others have to join anew."""
        if rank in self._present:
            self.meeting.over = True
            self.meeting, self._present = Meeting(), set()
            self.reached = max(0, self.reached - 1)
        self._present.add(rank)
        return self.meeting

    def leave(self, rank: int, meeting: Meeting) -> None:
        """A rank has published all states. Returns once all others have too, or one is missing."""
        meeting.finished.add(rank)
        while not meeting.over and len(meeting.finished) < self.size:
            world().sleep(LOOK_S)
        self.done = self.done or not meeting.over


@dataclass
class Rank(Program):
    """One rank of a job, with its part of every tensor."""

    job: Job
    rank: int
    pace_s: float = 10.0

    def __call__(self, here: Surroundings) -> None:
        while not self.job.done:
            meeting = self.job.enter(self.rank)
            try:
                self._session(here, meeting)
            except (Fenced, OwnerFailed) as error:
                # The generation after this one has taken over, or another rank stands still.
                here.simulation.log(here.name, "sees", type(error).__name__)
                world().sleep(LOOK_S)
            except DcrError as error:
                here.trouble(error)

    def _session(self, here: Surroundings, meeting: Meeting) -> None:
        job, first = self.job, self.rank == 0
        group = SimGroup(meeting, self.rank, job.size)
        here.intent = None
        settings = Settings(
            base=here.model.directory(0), state_dir=job.state_dir, baseline_dir=None, fence=True, context=True,
            timeout_s=TIMEOUT_S, signer=None, verifier=None, workers=0, progress=None,
        )  # fmt: skip
        with ExitStack() as stack:
            weights = shards(here.model, group.from_first(job.reached) % len(here.model.files), self.rank)
            sender, plan = join(here.store, weights, group, settings, stack)
            stack.callback(sender.close)
            session = here.truth.opened(sender.position.version) if first else None
            while group.from_first(job.reached) < job.states:
                if first:
                    state = (job.reached + 1) % len(here.model.files)
                    here.intent = Intent("trainer", state, session)
                    meeting.intents.append(here.intent)
                tries = max(group.gather(sender.tries))
                if self._publish(here, sender, plan, meeting.intents[-1], tries) and first:
                    job.reached += 1
                world().sleep(world().uniform(0.0, self.pace_s))
        job.leave(self.rank, meeting)

    def _publish(self, here: Surroundings, sender: Sender, plan: Plan, intent: Intent, tries: int) -> bool:
        """False where the attempt has failed and the same session may try again."""
        reader = Reader(by_key(shards(here.model, intent.state, self.rank)))
        try:
            report = self._write(sender, plan, reader, intent, tries)
        except (CommitConflict, Fenced):
            here.truth.lost(intent)
            raise
        except RetryError as error:
            here.simulation.log(here.name, "failed", type(error).__name__)
            if sender.stopped is not None:
                raise
            return False
        here.truth.published(intent, report.version)
        return True

    @staticmethod
    def _write(sender: Sender, plan: Plan, reader: Reader, intent: Intent, tries: int) -> PublishReport:
        with sender.version(step=intent.state, tries=tries) as writer:
            for piece, region in plan.own(sender.run):
                writer.add_piece(region, plan.read(piece, reader))
            writer.scan()
        return writer.report


def shards(model: TinyModel, state: int, rank: int) -> list[Shard]:
    """What one of two ranks holds: half the rows of a matrix, and the whole of every other tensor."""
    made = []
    for name, dtype, shape, body in model.tensors(state):
        tensor = torch.frombuffer(bytearray(body), dtype=_TORCH[dtype]).reshape(shape)
        there = View.of(shape)
        if len(shape) > 1:
            rows = shape[0] // 2
            tensor, there = tensor[rank * rows :][:rows].clone(), there.narrow(0, rank * rows, rows)
        part = Part(name, shape, there, View.of(tensor.shape))
        made.append(Shard(name, tensor, (part,), tensor.dtype))
    return made


@dataclass
class Releaser(Program):
    """Releases one version after the other, each as soon as ``required`` have proved it, until the last is released."""

    finished: Callable[[], bool]
    required: tuple[str, ...]
    pace_s: float = 5.0

    def __call__(self, here: Surroundings) -> None:
        while not (self.finished() and here.truth.released == here.truth.newest):
            try:
                self._release(here)
            except (NotAcknowledged, BadInput) as error:
                # Not yet; somebody may be about to prove it, or to commit it.
                here.simulation.log(here.name, "waits", type(error).__name__)
            except DcrError as error:
                here.trouble(error)
            world().sleep(world().uniform(0.0, self.pace_s))

    def _release(self, here: Surroundings) -> None:
        _, start = load_run(here.store)
        newest = here.truth.newest
        wanted = max(1, newest - int(world().uniform(0.0, 3.0)))
        release(here.store, read_position(here.store, start, wanted), self.required)
