"""Kill tests: a real sender or trainer of two ranks, and a real receiver, on a real S3 server, killed (SIGKILL) at
random moments.

``python -m dcr_s3.testing.chaos --rounds N --json``. After every kill the receiver's directory is compared with the
states that were published, and after every round it must hold the newest one, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import logging
import mmap
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

from dcr_s3.errors import DcrError
from dcr_s3.receiver import Receiver
from dcr_s3.sender import Sender
from dcr_s3.sending.blocks import BlockBuilder
from dcr_s3.store import open_store
from dcr_s3.store.wrapped import Request, WrappedStore
from dcr_s3.testing.chaos_model import ChaosModel
from dcr_s3.testing.chaos_ranks import ROLES, publish_as_rank
from dcr_s3.testing.servers import SeaweedServer
from dcr_s3.world import World, living_in

R = TypeVar("R")

BLOCK_BYTES = 1 << 16
BUCKET = "chaos"
DEADLINE_S = 120.0
_NOTE_BYTES = 64
_PLACES = {
    "send": ("open", "scan", "upload", "commit", "apply"),
    "receive": ("look", "fetch", "apply", "acknowledge"),
    "committer": ("open", "scan", "upload", "gather", "commit"),
    "owner": ("open", "scan", "upload", "list"),
}
GRACE_S = 5.0
"""How long a rank may stay once another one is gone."""
_fork = multiprocessing.get_context("fork")


class _Board:
    """A line of shared memory on which a process notes what it is doing, readable after it was killed."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _NOTE_BYTES)

    def note(self, place: str) -> None:
        """Writes."""
        self._memory[:] = place.encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES, b"\0")

    def read(self) -> str:
        """Reads."""
        return self._memory[:].rstrip(b"\0").decode()


class _NotingWorld(World):
    """The real one; notes when a state file is written, which is when cells are overwritten."""

    def __init__(self, board: _Board) -> None:
        self._board = board

    def replace(self, source: Path, target: Path) -> None:
        if target.suffix == ".json":
            self._board.note("apply")
        super().replace(source, target)


class _NotingStore(WrappedStore):
    """Notes what is asked for, and logs which ranges of segments are fetched."""

    def __init__(self, url: str, board: _Board, log: Path) -> None:
        super().__init__(open_store(url))
        self._board = board
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def around(self, request: Request, send: Callable[[Request], R]) -> R:
        self._board.note(_place(request))
        if request.key.startswith("segments/") and request.buffer is not None:
            # Before it is answered: a reply that is cut off by a kill counts as fetched.
            os.write(self._log, f"{request.key} {request.number} {len(request.buffer)}\n".encode())
        return send(request)


def _place(request: Request) -> str:
    folder = request.key.partition("/")[0]
    writes = request.kind in ("put", "upload_part", "complete")
    match folder:
        case "segments":
            return "upload" if writes else "fetch"
        case "manifests":
            return "commit" if writes else "look"
        case "acks":
            return "acknowledge"
        case "owners":
            return "list" if writes else "gather"
    return "open"


@dataclass
class Figures:
    """What a kill test came to. ``mismatches`` counts directories that did not hold the bits they should."""

    rounds: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    mismatches: int = 0
    delta_bytes: int = 0
    refetched_bytes: int = 0

    @property
    def refetched_fraction(self) -> float:
        """Bytes fetched again, of the deltas' bytes."""
        return round(self.refetched_bytes / max(1, self.delta_bytes), 4)


class Chaos:
    """One run in one bucket. ``size_bytes`` is a full copy of the model."""

    def __init__(self, url: str, root: Path, seed: int, size_bytes: int) -> None:
        self.figures = Figures()
        self._url = url
        self._root = root
        self._dice = random.Random(seed)
        self._model = ChaosModel(root / "model", seed, size_bytes)
        self._mirror = root / "mirror"
        self._log = root / "fetched.log"
        self._usual_s = {"send": 1.0, "receive": 1.0, "committer": 3.0, "owner": 3.0}
        self._launches = 0

    def start(self) -> None:
        """Creates the run, and the mirror."""
        self._finish("send", self._send)
        self._finish("receive", self._receive)
        self._check(strict=True)

    def round(self) -> None:
        """Publishes one state, by one sender or two ranks, and pulls it; some are killed on the way, and run again."""
        self._model.step()
        publishing = self._dice.choice(("send", *ROLES))
        victims = self._dice.choice(((publishing,), ("receive",), (publishing, "receive")))
        if publishing == "send":
            self._perhaps_killed("send", self._send, "send" in victims)
        else:
            if publishing in victims:
                self._train_with_victim(publishing)
            self._train()
        self._perhaps_killed("receive", self._receive, "receive" in victims)
        self._check(strict=True)
        self.figures.rounds += 1

    def finish(self) -> Figures:
        """Adds up what was fetched."""
        seen: set[tuple[str, str]] = set()
        for line in self._log.read_text().splitlines():
            key, start, size = line.split()
            self.figures.delta_bytes += int(size) if (key, start) not in seen else 0
            self.figures.refetched_bytes += int(size) if (key, start) in seen else 0
            seen.add((key, start))
        return self.figures

    def _perhaps_killed(self, role: str, program: Callable[[_Board], None], kill: bool) -> None:
        if kill:
            board = _Board()
            process = _fork.Process(target=program, args=(board,))
            process.start()
            self._kill(process, role, board)
            self._check(strict=False)
        self._finish(role, program)

    def _kill(self, process: BaseProcess, role: str, board: _Board) -> None:
        """Kills a process at some moment, if it has not ended before."""
        self._wait(process, role, board)
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            self.figures.kills[f"{role}: {board.read() or 'start'}"] += 1

    def _train_with_victim(self, victim: str) -> None:
        """Both ranks; the one that is left is stopped as a launcher would, if it does not end by itself."""
        ranks, boards = self._launch()
        self._kill(ranks[victim], victim, boards[victim])
        for process in ranks.values():
            process.join(GRACE_S)
            process.kill()
            process.join()
        self._check(strict=False)

    def _train(self) -> None:
        """Both ranks, undisturbed."""
        begun = time.monotonic()
        ranks, _ = self._launch()
        for role, process in ranks.items():
            process.join(DEADLINE_S)
            self._note_end(role, process, begun)

    def _launch(self) -> tuple[dict[str, BaseProcess], dict[str, _Board]]:
        self._launches += 1
        rendezvous = self._root / f"rendezvous-{self._launches}"
        boards = {role: _Board() for role in ROLES}
        ranks: dict[str, BaseProcess] = {
            role: _fork.Process(target=self._rank, args=(rank, rendezvous, boards[role]))
            for rank, role in enumerate(ROLES)
        }
        for process in ranks.values():
            process.start()
        return ranks, boards

    def _wait(self, process: BaseProcess, role: str, board: _Board) -> None:
        """Until a random moment: any, or one just after the process has come to some place."""
        moment = time.monotonic() + self._dice.uniform(0.0, 1.1 * self._usual_s[role])
        place = self._dice.choice((None, *_PLACES[role]))
        if place is not None:
            moment = time.monotonic() + 3.0 * self._usual_s[role]
            while process.is_alive() and board.read() != place and time.monotonic() < moment:
                time.sleep(0.0005)
            moment = time.monotonic() + self._dice.uniform(0.0, 0.02)
        process.join(max(0.0, moment - time.monotonic()))

    def _finish(self, role: str, program: Callable[[_Board], None]) -> None:
        begun = time.monotonic()
        process = _fork.Process(target=program, args=(_Board(),))
        process.start()
        process.join(DEADLINE_S)
        self._note_end(role, process, begun)

    def _note_end(self, role: str, process: BaseProcess, begun: float) -> None:
        if process.exitcode != 0:
            raise RuntimeError(f"{role} ended with {process.exitcode} where nothing disturbed it")
        self._usual_s[role] += 0.3 * (time.monotonic() - begun - self._usual_s[role])

    def _rank(self, rank: int, rendezvous: Path, board: _Board) -> None:
        store = _NotingStore(self._url, board, self._root / "sent.log")
        with living_in(_NotingWorld(board)), _small_blocks():
            try:
                publish_as_rank(
                    store, rank, rendezvous, base=self._model.directory(0), step=self._model.newest,
                    weights=self._model.directory(self._model.newest), state_dir=self._root / "state",
                )  # fmt: skip
            except DcrError as error:
                sys.exit(error.exit_code)

    def _send(self, board: _Board) -> None:
        store = _NotingStore(self._url, board, self._root / "sent.log")
        with living_in(_NotingWorld(board)), _small_blocks():
            base, state_dir = self._model.directory(0), self._root / "state"
            with Sender.open(store, base=base, state_dir=state_dir, workers=1) as sender:
                board.note("scan")
                sender.publish(self._model.directory(self._model.newest), step=self._model.newest)

    def _receive(self, board: _Board) -> None:
        store = _NotingStore(self._url, board, self._log)
        with living_in(_NotingWorld(board)):
            Receiver(store, self._mirror, base=self._model.directory(0), name="mirror", workers=1).pull()

    def _check(self, *, strict: bool) -> None:
        """Compares the mirror with the state that it says it holds; ``strict``: it must be the newest."""
        try:
            state = json.loads((self._mirror / "dcr_state.json").read_bytes())
        except FileNotFoundError:
            state = None
        if state is None or state["status"] != "clean":
            self.figures.mismatches += strict
            return
        step = state["position"]["step"] or 0
        right = self._model.holds(step, self._mirror) and (not strict or step == self._model.newest)
        self.figures.mismatches += not right


@contextmanager
def _small_blocks() -> Iterator[None]:
    """So that a small model has as many blocks and segments as a large one."""
    builder = partial(BlockBuilder, BLOCK_BYTES)
    with (
        patch.object(Sender, "least_segment_bytes", 1),
        patch.multiple("dcr_s3.sending.version", BLOCK_DENSE_BYTES=BLOCK_BYTES, BlockBuilder=builder),
    ):
        yield


def run(rounds: int, seed: int, size_bytes: int, progress: Callable[[str], None] = lambda _: None) -> Figures:
    """Runs the kill test on a server and in a directory of its own."""
    with tempfile.TemporaryDirectory(prefix="dcr-chaos-") as directory, SeaweedServer() as server:
        server.create_bucket(BUCKET)
        os.environ.update(server.environment)
        chaos = Chaos(f"s3://{BUCKET}/run", Path(directory), seed, size_bytes)
        chaos.start()
        for number in range(rounds):
            chaos.round()
            if (number + 1) % 10 == 0:
                progress(f"{number + 1} rounds, {sum(chaos.figures.kills.values())} kills")
        return chaos.finish()


def main() -> int:
    """Returns 1 where bits differ."""
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="decides victims and moments")
    parser.add_argument("--size-mb", type=int, default=16, help="size of a full copy of the model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    try:
        figures = run(arguments.rounds, arguments.seed, arguments.size_mb << 20, partial(print, file=sys.stderr))
    except DcrError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    result = {
        "rounds": figures.rounds,
        "kills": dict(sorted(figures.kills.items())),
        "mismatches": figures.mismatches,
        "delta_bytes": figures.delta_bytes,
        "refetched_bytes": figures.refetched_bytes,
        "refetched_fraction": figures.refetched_fraction,
        "seed": arguments.seed,
    }
    print(json.dumps(result) if arguments.json else "\n".join(f"{k}: {v}" for k, v in result.items()))
    return int(figures.mismatches > 0)


if __name__ == "__main__":
    sys.exit(main())
