"""The sender: publishes policy versions of one run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from dcr_s3 import joint
from dcr_s3.errors import BadInput, CommitConflict, DcrError, OwnerFailed, RunMissing
from dcr_s3.format.digest import StateDigest
from dcr_s3.format.keys import attempt_name
from dcr_s3.format.manifest import Manifest, Parent, Statistics
from dcr_s3.format.owner import OwnerList
from dcr_s3.format.release import Release
from dcr_s3.format.run import Run
from dcr_s3.format.segment import SegmentHeader
from dcr_s3.format.signature import Signer, Verifier
from dcr_s3.format.snapshot import Snapshot
from dcr_s3.protocol.chain import read_next
from dcr_s3.protocol.membership import Required
from dcr_s3.protocol.position import Position
from dcr_s3.reading import load_run, read_position
from dcr_s3.replay import Replay
from dcr_s3.reports import PublishReport
from dcr_s3.retention import MIN_AGE_S, GcReport, gc, sweep_uploads
from dcr_s3.sending.baseline import Baseline, open_baseline
from dcr_s3.sending.commit import commit
from dcr_s3.sending.create import Base, create_run, read_base
from dcr_s3.sending.owners import Owners, ranges
from dcr_s3.sending.segments import PART_BYTES, SegmentSizes, SegmentWriter
from dcr_s3.sending.version import Draft, VersionWriter
from dcr_s3.snapshots import publish_snapshot
from dcr_s3.store import Store, open_store
from dcr_s3.store.metered import MeteredStore
from dcr_s3.targets.checkpoint import Checkpoint
from dcr_s3.targets.mirror import Mirror
from dcr_s3.timeline import Timeline
from dcr_s3.workers import InlineExecutor, Progress, make_executor, no_progress
from dcr_s3.world import timestamp, world

UPLOADERS = 4
FENCE_TRIES = 5


class Sender:
    """Publishes versions of one run, one at a time.

    A context manager; also usable without, ending with :meth:`close`.
    """

    least_segment_bytes: ClassVar[int] = 256 << 10
    """A segment is never closed below this, save the last of a version."""
    part_bytes: ClassVar[int] = PART_BYTES
    """Segments of twice this size or more go up in parts."""

    def __init__(
        self,
        store: MeteredStore,
        run: Run,
        start: Position,
        mirror: Mirror,
        *,
        workers: int | None,
        progress: Progress,
        resources: ExitStack,
        owners: Owners | None = None,
        session: str | None = None,
        parts: int = 1,
    ) -> None:
        self.run = run
        self._parts = parts
        self._store = store
        self._start = start
        self._progress = progress
        self._resources = resources
        self._encoders = resources.enter_context(make_executor(workers, "encode"))
        self._uploaders: Executor = resources.enter_context(
            InlineExecutor() if workers == 0 else ThreadPoolExecutor(UPLOADERS, thread_name_prefix="dcr-upload")
        )
        mover: Executor = resources.enter_context(
            InlineExecutor() if workers == 0 else ThreadPoolExecutor(1, thread_name_prefix="dcr-baseline")
        )
        self._baseline = Baseline(mirror, mover, self._encoders)
        self._ahead = 1 if workers == 0 else getattr(self._encoders, "_max_workers", 1) + 2
        self._owners = owners or Owners(store)
        self._session = session or world().token(6)
        self._epoch = mirror.position.epoch
        self._tries = 0
        self._announces = False
        self._busy = False
        self._failed: BaseException | None = None

    @classmethod
    def open(
        cls,
        url: str | Store,
        *,
        base: Base | None = None,
        state_dir: Path | None = None,
        fence: bool = True,
        context: bool = True,
        parts: int = 1,
        sweep_after_s: float | None = MIN_AGE_S,
        signer: Signer | None = None,
        verifier: Verifier | None = None,
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Opens a run, creating it from ``base`` if there is none, and brings the baseline to the newest version.

        The baseline lives in ``state_dir`` (see ``default_state_dir``), or in RAM if ``base`` is a state dict. With
        ``fence`` an empty version of a higher epoch is committed first: any other sender of the run loses its next
        commit, and uploads that it left unfinished more than ``sweep_after_s`` seconds ago are dropped in the
        background (None: never). A one-shot publisher needs no fence. ``parts`` cuts matrices into so many parts each
        way, for receivers whose ranks hold such parts (tensor parallelism) and fetch nothing else. With ``signer``
        everything is signed, and nothing is believed that is not signed by it or by a key of ``verifier``. ``workers``:
        encoding threads, one per core by default, 0 for none.

        Raises ``RunMissing``, ``RunExists``, ``BadInput``, ``Busy``, ``BadSignature`` and store errors; nothing is
        changed then.
        """
        report = progress or no_progress
        store = MeteredStore(open_store(url, signer=signer, verifier=verifier))
        base = Path(base) if isinstance(base, str) else base
        with ExitStack() as stack:
            if isinstance(url, str):
                stack.callback(store.close)
            executor = stack.enter_context(make_executor(workers, "open"))
            tensors = read_base(base) if base is not None else []
            try:
                run, start = load_run(store)
            except RunMissing:
                if base is None:
                    raise
                run, start = create_run(store, tensors, context=context, executor=executor, progress=report)
            baseline = open_baseline(store, run, start, base, tensors, state_dir, executor=executor, progress=report)
            stack.callback(baseline.close)
            sender = cls(
                store, run, start, baseline, workers=workers, progress=report, resources=stack.pop_all(), parts=parts
            )
        try:
            sender._catch_up()
            if fence:
                sender._fence()
        except BaseException:
            sender.close()
            raise
        if fence and sweep_after_s is not None:
            sender._uploaders.submit(sweep_uploads, store.inner, sender.position, sweep_after_s)
        return sender

    @classmethod
    def share(
        cls,
        store: MeteredStore,
        run: Run,
        start: Position,
        baseline: Mirror,
        owners: Owners,
        session: str,
        *,
        fence: bool = True,
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """One of several owners of a run whose ``baseline`` is this owner's share at the newest version.

        ``session`` (12 random hex digits) is the same on all. Only owner 0 may ``fence``; the others' baselines then
        stand at the fence. Raises ``CommitConflict`` if another sender committed meanwhile.
        """
        resources = ExitStack()
        resources.callback(baseline.close)
        sender = cls(
            store, run, start, baseline,
            workers=workers, progress=progress or no_progress, resources=resources, owners=owners, session=session,
        )  # fmt: skip
        if fence:
            sender._fence(tries=1)
        return sender

    @property
    def stopped(self) -> BaseException | None:
        """The error after which this sender refuses to go on; only reopening the run helps.

        Waits until the baseline has followed the newest commit.
        """
        if self._failed is None:
            with suppress(Exception):
                self._settled()
        return self._failed

    @property
    def tries(self) -> int:
        """How many attempts at the next version have failed."""
        return self._tries

    @property
    def position(self) -> Position:
        """The newest version that this sender knows to be committed."""
        return self._baseline.position

    def version(self, *, step: int | None = None, tries: int | None = None) -> VersionWriter:
        """Begins the next version; a context manager whose end commits. Only one at a time.

        Several owners leave it together: owner 0 commits for all, or nobody does. They must give the same ``tries``,
        the number of earlier attempts at this version, where they may have counted differently.
        Raises ``DcrError`` if an earlier one ended in a way that only reopening the run can clear up.
        """
        if self._failed is not None:
            raise DcrError(f"this sender stopped after an error ({self._failed}); open the run again")
        if self._busy:
            raise BadInput("a version is already being written; leave its block first")
        version = self.position.version + 1
        baseline = self._settled()
        self._tries = self._tries if tries is None else tries
        attempt = self._name_attempt(self._tries)
        timeline = Timeline()
        header = SegmentHeader(self.run.run_id, version, attempt, self._owners.owner, 0)
        sizes = SegmentSizes(
            least_bytes=self.least_segment_bytes,
            dense_bytes=max(1, self.run.dense_bytes // 16),
            part_bytes=self.part_bytes,
        )
        segments = SegmentWriter(self._store, header, self._uploaders, sizes, timeline)
        redo = baseline.redo(f"{version:012d}-{attempt}")
        self._busy = True
        self._tries += 1
        before = self._store.meter.traffic.total_requests
        return VersionWriter(
            self.run,
            baseline,
            segments,
            redo,
            encoders=self._encoders,
            ahead=self._ahead,
            commit=lambda writer, draft: self._commit_draft(writer, draft, attempt, before),
            failed=lambda error: self._owners.fail(self.run.run_id, version, attempt, error),
            release=self._release,
            timeline=timeline,
            step=step,
            parts=self._parts,
            progress=self._progress,
        )

    def publish(
        self, source: Path | str | Mapping[str, Any] | Iterable[tuple[str, Any]], *, step: int | None = None
    ) -> PublishReport:
        """Publishes a whole state: a checkpoint directory, a state dict, or an iterator of (name, tensor).

        A directory or a dict must not change meanwhile; an iterator's tensors may be reused once it is asked for the
        next.
        """
        with self.version(step=step) as writer:
            if isinstance(source, (str, Path)):
                writer.add_checkpoint(Checkpoint.open(Path(source)))
            else:
                whole = isinstance(source, Mapping)
                for name, tensor in source.items() if isinstance(source, Mapping) else source:
                    writer.add(name, tensor, borrow=whole)
        return writer.report

    def wait_for(
        self,
        version: int,
        receivers: Required = None,
        *,
        timeout_s: float,
        poll_interval_s: float = 0.5,
    ) -> list[str]:
        """Waits until receivers have proved a version: those named, or so many, or all living members by default.

        Returns the names of all that have proved it. Raises ``NotAcknowledged`` naming whoever has not after
        ``timeout_s``, ``BadInput`` if the version is not committed.
        """
        return joint.wait_for(
            self._store, self._position_of(version), receivers, timeout_s=timeout_s, poll_interval_s=poll_interval_s
        )

    def release(self, version: int, required: Required = None) -> Release:
        """Releases a version, to those that apply only released ones, if all ``required`` receivers have proved it.

        Never goes backwards: returns the newer release if there is one. Raises ``NotAcknowledged`` naming whoever has
        not proved it, ``BadInput``.
        """
        return joint.release(self._store, self._position_of(version), required)

    def snapshot(self) -> Snapshot:
        """Puts the newest version into the bucket as a full state, from the baseline, proving it first."""
        return publish_snapshot(self._store, self._settled(), self._encoders, self._progress)

    def sweep(self, *, min_age_s: float = MIN_AGE_S) -> GcReport:
        """Deletes what earlier senders left of attempts that can never be committed, if older than ``min_age_s``."""
        return gc(self._store, min_age_s=min_age_s, uncommitted_only=True, dry_run=False, workers=0)

    def _position_of(self, version: int) -> Position:
        return self.position if version == self.position.version else read_position(self._store, self._start, version)

    def close(self) -> None:
        """Makes the baseline durable and lets go of it, of threads and connections."""
        try:
            if self._failed is None:
                self._settled().flush()
        finally:
            self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settled(self) -> Mirror:
        """The baseline's mirror at the newest version that this sender has committed."""
        try:
            return self._baseline.settled()
        except BaseException as error:
            self._failed = error
            raise

    def _catch_up(self) -> None:
        mirror = self._settled()
        replay = Replay(
            self._store,
            self.run,
            self._start,
            mirror,
            decoders=self._encoders,
            fetchers=self._uploaders,
            progress=self._progress,
        )
        for _ in replay.catch_up():
            pass
        self._baseline.position = mirror.position
        self._epoch = self.position.epoch

    def _fence(self, tries: int = FENCE_TRIES) -> None:
        """Commits an empty version of the next epoch, on top of whatever is newest."""
        self._announces = True
        draft = Draft((), tuple(self._settled().digests), StateDigest(), (), 0, None)
        for left in reversed(range(tries)):
            self._epoch = self.position.epoch + 1
            try:
                manifest = self._manifest("fence", self._list(draft, self._name_attempt(0)), None)
                self._advance(commit(self._store, manifest), draft)
                return
            except CommitConflict:
                if not left:
                    raise
                self._catch_up()
                draft = Draft((), tuple(self._settled().digests), StateDigest(), (), 0, None)

    def _name_attempt(self, tries: int) -> str:
        return attempt_name(self._epoch, self._session, tries)

    def _list(self, draft: Draft, attempt: str) -> OwnerList:
        return OwnerList(
            run_id=self.run.run_id,
            version=self.position.version + 1,
            attempt=attempt,
            owner=self._owners.owner,
            segments=draft.segments,
            gain=draft.gain.hex(),
            touched=ranges(draft.touched),
            changed_elements=draft.changed_elements,
        )

    def _manifest(self, kind: Literal["delta", "fence"], whole: OwnerList, step: int | None) -> Manifest:
        position = self.position
        return Manifest(
            run_id=self.run.run_id,
            version=whole.version,
            kind=kind,
            parent=Parent(version=position.version, sha256=position.sha256),
            epoch=self._epoch,
            write_id=world().token(16),
            attempt=whole.attempt,
            next_attempt=self._name_attempt(0) if self._announces else None,
            created_at=timestamp(),
            step=step,
            state_before=position.state,
            state_after=(StateDigest.from_hex(position.state) + StateDigest.from_hex(whole.gain)).hex(),
            segments=whole.segments,
            touched=whole.touched,
            statistics=Statistics(
                total_elements=self.run.total_elements,
                changed_elements=whole.changed_elements,
                dense_bytes=self.run.dense_bytes,
                segment_bytes=sum(s.size_bytes for s in whole.segments),
            ),
        )

    def _commit_draft(self, writer: VersionWriter, draft: Draft, attempt: str, requests_before: int) -> PublishReport:
        mine = self._list(draft, attempt)
        try:
            with writer.timeline.stage("commit"):
                if self._owners.owner == 0:
                    body = commit(self._store, self._manifest("delta", self._owners.gather(mine), writer.step))
                else:
                    body = self._owners.follow(mine)
            committed_at = world().time()
            manifest = self._advance(body, draft)
        except OwnerFailed:
            raise
        except BaseException as error:
            self._failed = error
            raise
        self._release()
        return PublishReport(
            version=manifest.version,
            step=writer.step,
            changed_elements=manifest.statistics.changed_elements,
            total_elements=self.run.total_elements,
            wire_bytes=len(body) + manifest.statistics.segment_bytes,
            dense_bytes=self.run.dense_bytes,
            seconds=writer.timeline.seconds(),
            segments=len(manifest.segments),
            requests=self._store.meter.traffic.total_requests - requests_before,
            committed_at=committed_at,
        )

    def _advance(self, body: bytes, draft: Draft) -> Manifest:
        """Lets the baseline follow to the version that ``body`` has committed."""
        manifest, target = read_next(self.position, body)
        redo = [draft.redo] if draft.redo is not None else []
        self._baseline.advance(target, redo, draft.digests)
        self._tries = 0
        return manifest

    def _release(self) -> None:
        self._busy = False
