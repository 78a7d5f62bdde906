"""Tries a user's bucket: rights, clock, speed, and every promise of a store that a run relies on."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from statistics import median
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from pydantic import BaseModel

from dcr_s3.errors import BadInput, CorruptObject, DcrError, Forbidden, NotFound, RunMissing, StoreOutcome
from dcr_s3.format import limits
from dcr_s3.format.keys import RUN_KEY
from dcr_s3.format.run import Run
from dcr_s3.store import Store, open_store
from dcr_s3.workers import Progress, no_progress
from dcr_s3.world import world

Severity = Literal["blocks", "limits", "harmless"]

SKEW_LIMIT_S = 5.0
_PART_BYTES = 8 << 20
_PARTS = 8
_THREADS = 8

_MEANINGS: tuple[tuple[str, Severity, str], ...] = (
    (
        "test_create_only_where_nothing_is",
        "blocks",
        "conditional create is ignored: two senders could overwrite each other's versions. Only with a single sender, "
        "ever, is this store usable",
    ),
    (
        "test_racing_creates",
        "blocks",
        "conditional create has several winners in a race: two senders could both believe that they committed",
    ),
    (
        "test_compare_and_set_of_a_missing_object",
        "limits",
        "a compare-and-set of a missing object succeeds: a release that was deleted could be set by a late sender",
    ),
    ("test_compare_and_set", "limits", "compare-and-set is ignored: joint commits could move a release backwards"),
    ("test_racing_compare_and_sets", "limits", "compare-and-set has several winners: do not use joint commits here"),
    (
        "test_damaged_upload_is_refused",
        "limits",
        "uploads are not checked: damage on the way in is noticed by receivers only, who refuse the version",
    ),
    ("test_list_order_across_slashes", "harmless", "listings are sorted in another way; nothing relies on it"),
    ("test_list_uploads", "limits", "abandoned uploads cannot be found or dated: set a lifecycle rule to drop them"),
    ("test_two_uploads_of_one_key", "harmless", "a sender never opens two uploads of one key"),
    (
        "test_upload_aborted_by_someone_else",
        "limits",
        "a lost upload is noticed late; its version fails and is retried",
    ),
    ("test_use_after_the_end", "harmless", "only the error that a misuse gives is another one"),
    ("test_keys_are_arbitrary_text", "harmless", "keys of a run are plain ASCII"),
    ("test_small_part_before_the_last", "harmless", "a sender never does that"),
    ("test_unchanged_object_is_not_sent", "limits", "conditional reads are ignored: they cost the object's bytes each"),
    ("test_list", "limits", "listings are wrong: status, relays and retention may miss objects"),
    ("test_poller", "blocks", "receivers cannot follow"),
    ("test_read", "blocks", "receivers cannot fetch in pieces"),
    ("test_", "blocks", "senders and receivers rely on it"),
)


class Check(BaseModel):
    """One thing that was tried. ``meaning`` says what a failure means for a run; empty where all is well."""

    name: str
    ok: bool
    severity: Severity = "harmless"
    detail: str = ""
    meaning: str = ""


class Diagnosis(BaseModel):
    """All checks, and what was measured: seconds of one small request, bytes per second of parallel large ones, and
    how far this machine's clock is ahead of the store's."""

    url: str
    run_id: str | None
    checks: list[Check]
    latency_s: float | None = None
    upload_bytes_per_s: float | None = None
    download_bytes_per_s: float | None = None
    clock_ahead_s: float | None = None

    @property
    def usable(self) -> bool:
        """Whether nothing was found that a run cannot work with."""
        return not any(c.severity == "blocks" and not c.ok for c in self.checks)


def examine(url: str, *, progress: Progress | None = None) -> Diagnosis:
    """Tries everything under a scratch prefix of the run's address, which is removed again; a run there is not touched.

    With credentials that may not write it ends after saying so. Raises ``BadInput`` if the contract's test framework is
    not installed, ``ConfigError`` and ``StoreUnavailable`` if the store cannot be reached at all.
    """
    report = progress or no_progress
    scratch = _below(url, f"doctor/{world().token(8)}")
    with contextlib.closing(open_store(url)) as store:
        diagnosis = Diagnosis(url=store.url, run_id=None, checks=[])
        diagnosis.checks.append(_find_run(store, diagnosis))
    with contextlib.closing(open_store(scratch)) as store:
        try:
            diagnosis.checks += _try_rights(store)
            if all(c.ok for c in diagnosis.checks if c.name == "may write"):
                _measure(store, diagnosis)
                diagnosis.checks.append(_check_clock(diagnosis))
                diagnosis.checks += _run_contract(store, scratch, report)
        finally:
            left = _clean(store)
    if left:
        diagnosis.checks.append(
            Check(name="scratch removed", ok=False, severity="limits", detail=left, meaning="delete it by hand")
        )
    return diagnosis


def _below(url: str, name: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))


def _find_run(store: Store, diagnosis: Diagnosis) -> Check:
    try:
        found = store.get(RUN_KEY, limit_bytes=limits.RUN_BYTES)
        assert found is not None
        diagnosis.run_id = Run.from_bytes(found.body, where=f"{store.url}/{RUN_KEY}").run_id
    except NotFound:
        return Check(name="run", ok=True, detail="none here yet")
    except Forbidden as error:
        return Check(
            name="run", ok=False, severity="blocks", detail=str(error), meaning="these credentials may not read"
        )
    except (CorruptObject, RunMissing) as error:
        return Check(name="run", ok=False, severity="blocks", detail=str(error), meaning="the address holds no run")
    return Check(name="run", ok=True, detail=diagnosis.run_id)


def _try_rights(store: Store) -> list[Check]:
    def upload() -> None:
        store.open_multipart("rights/upload").abort()

    tries: list[tuple[str, Severity, str, Callable[[], object]]] = [
        ("may list", "limits", "status and relays need it; without it S3 says 403, not 404, of absent objects",
         lambda: list(store.list(""))),
        ("may write", "limits", "enough for a receiver that does not acknowledge; a sender needs more",
         lambda: store.put("rights/object", b"x")),
        ("may read", "blocks", "neither sender nor receiver can work", lambda: store.head("rights/object")),
        ("may upload in parts", "blocks", "a sender cannot work", upload),
        ("may list uploads", "limits", "the janitor needs it", lambda: list(store.list_uploads(""))),
        ("may delete", "limits", "the janitor and this clean-up need it", lambda: store.delete(["rights/object"])),
    ]  # fmt: skip
    checks = []
    for name, severity, meaning, act in tries:
        try:
            act()
            checks.append(Check(name=name, ok=True))
        except Forbidden as error:
            checks.append(Check(name=name, ok=False, severity=severity, detail=str(error), meaning=meaning))
            if name == "may write":
                break
        except StoreOutcome as error:
            checks.append(Check(name=name, ok=False, severity=severity, detail=str(error), meaning=meaning))
    return checks


def _measure(store: Store, diagnosis: Diagnosis) -> None:
    """Latency of requests for what is absent, throughput of parts and ranges in parallel, the store's clock."""
    latencies = []
    for _ in range(20):
        begun = world().monotonic()
        with contextlib.suppress(NotFound):
            store.head("speed/absent")
        latencies.append(world().monotonic() - begun)
    diagnosis.latency_s = round(median(latencies), 6)
    upload = store.open_multipart("speed/object")
    with ThreadPoolExecutor(_THREADS) as pool:
        begun = world().monotonic()
        list(pool.map(lambda n: upload.upload_part(n, bytearray(_PART_BYTES)), range(1, _PARTS + 1)))
        upload.complete()
        diagnosis.upload_bytes_per_s = round(_PART_BYTES * _PARTS / (world().monotonic() - begun))
        begun = world().monotonic()
        buffers = [memoryview(bytearray(_PART_BYTES)) for _ in range(_PARTS)]
        list(pool.map(lambda n: store.read_into("speed/object", n * _PART_BYTES, buffers[n]), range(_PARTS)))
        diagnosis.download_bytes_per_s = round(_PART_BYTES * _PARTS / (world().monotonic() - begun))
    before = world().time()
    store.put("clock", b"x")
    middle = (before + world().time()) / 2
    diagnosis.clock_ahead_s = round(middle - store.head("clock").modified_at, 1)


def _check_clock(diagnosis: Diagnosis) -> Check:
    ahead_s = diagnosis.clock_ahead_s or 0.0
    return Check(
        name="clocks agree",
        ok=abs(ahead_s) <= SKEW_LIMIT_S,
        severity="limits",
        detail=f"this machine is {ahead_s:+.1f} s from the store's clock",
        meaning="" if abs(ahead_s) <= SKEW_LIMIT_S else "ages and lags will be off by that; from 15 min on AWS refuses",
    )


def _run_contract(store: Store, scratch: str, progress: Progress) -> list[Check]:
    """Every test of the store contract, each under a prefix of its own below ``scratch``, where ``store`` is."""
    try:
        import pytest

        from dcr_s3.testing.bucket_contract import BucketContract
    except ImportError as error:
        raise BadInput(
            f"doctor runs the store contract, which needs pytest ({error}): pip install 'dcr-s3[doctor]'"
        ) from error
    contract = BucketContract()
    names = [name for name, _ in inspect.getmembers(BucketContract, inspect.isfunction) if name.startswith("test_")]
    checks = []
    for number, name in enumerate(names):
        test = getattr(contract, name)
        problem = ""
        for case, arguments in enumerate(_cases(test)):
            with _child(store, scratch, f"{number}-{case}") as empty:
                try:
                    test(empty, **arguments)
                except pytest.skip.Exception:
                    pass
                except (AssertionError, DcrError, StoreOutcome, pytest.fail.Exception) as error:
                    problem = (str(error) or _failed_line(error)).splitlines()[0][:300]
                    break
        checks.append(_judge(name, problem))
        progress("doctor", number + 1, len(names))
    return checks


@contextlib.contextmanager
def _child(store: Store, scratch: str, name: str) -> Iterator[Store]:
    """An empty store further down. An S3 client takes long to make, so that one is used for all."""
    from dcr_s3.store.s3 import S3Store

    if isinstance(store, S3Store):
        yield store.below(name)
    else:
        with contextlib.closing(open_store(_below(scratch, name))) as opened:
            yield opened


def _failed_line(error: BaseException) -> str:
    """The assertion that did not hold."""
    return traceback.extract_tb(error.__traceback__)[-1].line or type(error).__name__


def _cases(test: Any) -> Iterator[dict[str, Any]]:
    """The arguments that pytest's parametrize marks give a test."""
    axes = []
    for mark in getattr(test, "pytestmark", []):
        names, values = mark.args
        names = [names] if isinstance(names, str) else list(names)
        axes.append([dict(zip(names, value if len(names) > 1 else [value], strict=True)) for value in values])
    for combination in product(*axes):
        yield {name: value for part in combination for name, value in part.items()}


def _judge(name: str, problem: str) -> Check:
    shown = name.removeprefix("test_").replace("_", " ")
    if not problem:
        return Check(name=shown, ok=True)
    # The longest beginning that fits is the most particular one.
    fitting = [entry for entry in _MEANINGS if name.startswith(entry[0])]
    _, severity, meaning = max(fitting, key=lambda entry: len(entry[0]))
    return Check(name=shown, ok=False, severity=severity, detail=problem, meaning=meaning)


def _clean(store: Store) -> str:
    """Removes everything under the scratch prefix; what could not be removed, in words."""
    try:
        for upload in list(store.list_uploads("")):
            upload.abort()
        store.delete([o.key for o in store.list("")])
    except (DcrError, StoreOutcome) as error:
        return f"{store.url}: {error}"
    return ""
