"""The publisher: one object per rank of a trainer; a call after every optimizer step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch

from dcr_s3.errors import BadInput, OwnerFailed
from dcr_s3.format.signature import Signer, Verifier
from dcr_s3.mapping.group import Group
from dcr_s3.mapping.model import shards_of
from dcr_s3.mapping.part import Shard
from dcr_s3.mapping.read import Reader
from dcr_s3.mapping.residual import Residual, Residuals, Tensors, is_converted
from dcr_s3.protocol.position import Position
from dcr_s3.reports import PublishReport
from dcr_s3.sender import Sender
from dcr_s3.store import Store
from dcr_s3.training.agreement import Agreement, Replicas
from dcr_s3.training.joining import Settings, join
from dcr_s3.training.plan import Plan, by_key
from dcr_s3.workers import Progress

log = logging.getLogger(__name__)

Layout = Callable[[Any], Sequence[Shard]]


def named_tensors(model: Any) -> Tensors:
    """A module's parameters and buffers by name, as residual rules are given them."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _path(given: Path | str | None) -> Path | None:
    return Path(given) if given is not None else None


class Publisher:
    """Publishes a training model by shards. Every rank has one, and all call the same methods in the same order.

    :meth:`step` publishes in the background. Weights must not change before they have been compared: with
    :meth:`attach` an optimizer's steps wait for that by themselves, otherwise :meth:`step` waits. A version that failed
    is made up for by the next one.
    """

    def __init__(
        self,
        sender: Sender,
        plan: Plan,
        group: Group,
        *,
        layout: Layout,
        residuals: Residuals,
        tensors: Callable[[Any], Tensors],
        replicas: Replicas,
        resources: ExitStack,
    ) -> None:
        self._sender = sender
        self._plan = plan
        self._own = plan.own(sender.run)
        self._group = group
        self._layout = layout
        self._residuals = residuals
        self._tensors = tensors
        self._agreement = Agreement(plan, group, replicas)
        self._resources = resources
        self._thread = resources.enter_context(ThreadPoolExecutor(1, thread_name_prefix="dcr-publish"))
        self._compared = threading.Event()
        self._compared.set()
        self._last: Future[PublishReport] | None = None
        self._hooks: list[Any] = []

    @classmethod
    def open(
        cls,
        url: str | Store,
        model: Any,
        *,
        layout: Layout = shards_of,
        residuals: Sequence[Residual] = (),
        tensors: Callable[[Any], Tensors] = named_tensors,
        base: Path | str | None = None,
        state_dir: Path | str | None = None,
        baseline_dir: Path | str | None = None,
        fence: bool = True,
        context: bool = True,
        replicas: Replicas = "sampled",
        timeout_s: float = 600.0,
        signer: Signer | None = None,
        verifier: Verifier | None = None,
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Collective. Opens a run for all ranks of the default process group, creating it if there is none.

        ``layout`` says what this rank holds of ``model``; ``residuals`` compute the rest from ``tensors(model)``. A new
        run starts from ``base``, a checkpoint directory, or from the training weights as they are. If the weights are
        not those of the newest version, the baseline is rebuilt from the bucket in ``state_dir``, once per machine.
        Each rank keeps only its own share, in RAM or in a file in ``baseline_dir``. ``replicas``: whether ranks that
        hold the same elements compare a sample, all or none of them for every version. ``timeout_s``: how long a rank
        waits for the others. ``signer``, ``verifier``, ``context``, ``fence``, ``workers``: as for ``Sender.open``.

        Raises ``BadInput`` for a layout that leaves anything out, or in twice, ``StateMismatch`` for replicas that
        differ, ``OwnerFailed`` where another rank has the trouble; also what ``Sender.open`` raises.
        """
        with ExitStack() as stack:
            group = Group(timeout_s)
            stack.callback(group.close)
            rules = Residuals(residuals)
            settings = Settings(
                base=_path(base), state_dir=_path(state_dir), baseline_dir=_path(baseline_dir),
                fence=fence, context=context, timeout_s=timeout_s, signer=signer, verifier=verifier,
                workers=workers, progress=progress,
            )  # fmt: skip

            def shards() -> list[Shard]:
                return [*layout(model), *rules.rebuild([True] * len(rules.rules), tensors(model) if residuals else {})]

            sender, plan = join(url, group.together(shards), group, settings, stack)
            return cls(
                sender, plan, group,
                layout=layout, residuals=rules, tensors=tensors, replicas=replicas, resources=stack.pop_all(),
            )  # fmt: skip

    @property
    def position(self) -> Position:
        """The newest version that this rank knows to be committed."""
        return self._sender.position

    @property
    def sender(self) -> Sender:
        """This rank's sender: to wait for receivers and to release versions (one rank is enough)."""
        return self._sender

    @property
    def owned_bytes(self) -> int:
        """Bytes, in the stored dtypes, that this rank compares for a version and keeps of the baseline."""
        return sum(piece.size_bytes for piece, _ in self._own)

    @property
    def metadata_bytes(self) -> int:
        """Bytes that this rank has put into collectives so far, opening included; never weights."""
        return self._group.sent_bytes

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes every later step of ``optimizer`` wait until weights being published have been compared."""
        self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self.fence()))

    def step(self, model: Any, step: int | None = None) -> Future[PublishReport]:
        """Collective. Publishes the model as it is; the future gives the report once the version is committed.

        Waits for the version before to be finished. Raises, on all ranks, for a layout that is not the one it was
        opened with, and for an earlier error that trying again cannot mend.
        """
        flags: list[bool] = []
        shards: list[Shard] = []
        tensors = self._tensors(model) if self._residuals.rules else {}

        def prepare() -> None:
            self._raise_lasting()
            shards.extend(self._snapshot(model))
            flags.extend(self._residuals.changed(tensors))

        self._group.together(prepare)
        answers = self._group.gather([self._sender.tries, flags])
        combined = [any(answer[1][n] for answer in answers) for n in range(len(flags))]
        problem: Exception | None = None
        try:
            rebuilt = self._residuals.rebuild(combined, tensors)
            self._plan.check(rebuilt)
            shards += rebuilt
        except Exception as error:
            problem = error
        self._compared.clear()
        tries = max(answer[0] for answer in answers)
        self._last = self._thread.submit(self._publish, shards, problem, step, tries)
        if not self._hooks:
            self.fence()
        return self._last

    def fence(self) -> None:
        """Returns once the weights given to :meth:`step` may change."""
        self._compared.wait()

    def wait(self) -> PublishReport:
        """The report of the newest version begun, once it is committed; or its error."""
        if self._last is None:
            raise BadInput("nothing has been published yet")
        return self._last.result()

    def close(self) -> None:
        """Collective. Finishes what has begun and lets go of everything."""
        for hook in self._hooks:
            hook.remove()
        if self._last is not None:
            self._last.exception()
        self._sender.close()
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _raise_lasting(self) -> None:
        """The error of the version before, unless the version to come makes up for it."""
        error = self._last.exception() if self._last is not None else None
        if self._sender.stopped is not None:
            raise self._sender.stopped
        if error is not None:
            log.warning("the version before was not published (%s); this one carries its changes too", error)

    def _snapshot(self, model: Any) -> list[Shard]:
        """The model's shards, with copies of what may change outside of optimizer steps."""
        shards = self._layout(model)
        self._plan.check(shards)
        absent = [k for k in self._plan.layout.keys() - {s.key for s in shards} if not is_converted(k)]
        if absent:
            raise BadInput(f"training tensor {min(absent)}: is not in the layout any more; open the run again")
        return [replace(s, tensor=s.tensor.clone()) if s.eager else s for s in shards]

    def _publish(
        self, shards: Sequence[Shard], problem: Exception | None, step: int | None, tries: int
    ) -> PublishReport:
        try:
            with self._sender.version(step=step, tries=tries) as writer:
                reader = Reader(by_key(shards))
                self._agree(reader, problem)
                for piece, region in self._own:
                    if piece.sides[self._group.rank].key in reader:
                        writer.add_piece(region, self._plan.read(piece, reader))
                    else:  # the output of a conversion whose inputs have not changed
                        writer.add_unchanged(region)
                writer.scan()
                self._compared.set()
            self._residuals.commit()
            return writer.report
        finally:
            self._compared.set()

    def _agree(self, reader: Reader, problem: Exception | None) -> None:
        """Collective. Raises on all ranks if a conversion failed on any or if replicas differ."""
        turn = self.position.version
        mine: dict[str, str] = {}
        try:
            if problem is None:
                mine = self._agreement.digests(reader, turn)
        except Exception as error:
            problem = error
        answers = self._group.gather([None if problem is None else f"{type(problem).__name__}: {problem}", mine])
        if problem is not None:
            raise problem
        for rank, (text, _) in enumerate(answers):
            if text is not None:
                raise OwnerFailed(f"rank {rank} failed: {text}")
        self._agreement.compare([digests for _, digests in answers], turn)
