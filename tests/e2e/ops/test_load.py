"""Many receivers for many versions, and publishing through a bad network: nobody falls behind, nothing is lost."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from safetensors.numpy import save_file

from dcr_s3 import Receiver, Sender, init_run, verify_directory
from dcr_s3.planning.model import Prices, Workload, costs, predict
from dcr_s3.planning.rates import Rates
from dcr_s3.reports import PublishReport, PullReport
from dcr_s3.store.memory import MemoryStore
from dcr_s3.store.metered import MeteredStore
from dcr_s3.store.s3 import S3Store
from dcr_s3.testing.faults import FaultKind, FaultPlan
from dcr_s3.testing.proxy import FaultyProxy
from dcr_s3.testing.servers import SeaweedServer
from dcr_s3.world import World, living_in

RECEIVERS = 64
VERSIONS = 200
CELLS = 2_000
POLL_S = 0.1


class Policy:
    """A state that moves on by a few changed cells a step."""

    def __init__(self, home: Path, cells: int = CELLS) -> None:
        self._random = np.random.default_rng(1)
        self.cells = self._random.integers(0, 1 << 16, cells, np.uint16)
        self.base = home / "base"
        self.base.mkdir()
        save_file({"w": self.cells}, self.base / "model.safetensors")

    def step(self, share: float = 0.01) -> dict[str, np.ndarray]:
        changed = self._random.random(self.cells.size) < share
        self.cells[changed] += 1
        return {"w": self.cells}


@pytest.fixture
def ram_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is such a file system: 64 machines would have a disk each."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        yield tmp_path
        return
    with TemporaryDirectory(prefix="dcr-load-", dir=shm) as directory:
        yield Path(directory)


def test_64_receivers_follow_one_sender(ram_path: Path) -> None:
    """One process: the receivers share an event loop, each with its own mirror and its own count of requests."""
    policy = Policy(ram_path)
    bucket = MemoryStore()
    init_run(bucket, policy.base, state_dir=ram_path / "state", workers=0)
    stores = [MeteredStore(bucket) for _ in range(RECEIVERS)]
    seen: list[list[PullReport]] = [[] for _ in range(RECEIVERS)]
    sent: list[PublishReport] = []
    behind = threading.Semaphore(0)

    class Swift(World):
        """Without waiting for the disk, which 64 machines would do at the same time."""

        def sync(self, file: object) -> None:
            pass

        def sync_map(self, mapped: object) -> None:
            pass

        def sync_directory(self, directory: Path) -> None:
            pass

    def on_pull(number: int, report: PullReport) -> None:
        seen[number].append(report)
        behind.release()

    def publish() -> None:
        import torch

        with Sender.open(bucket, state_dir=ram_path / "state", fence=False, workers=0) as sender:
            for version in range(1, VERSIONS + 1):
                cells = torch.from_numpy(policy.step()["w"].view(np.int16).copy()).view(torch.uint16)
                sent.append(sender.publish({"w": cells}, step=version))
                # The trainer's next step takes long enough for everybody; waiting for them here shows that they do.
                for _ in range(RECEIVERS):
                    assert behind.acquire(timeout=60), f"a receiver fell behind at version {version}"

    async def follow_all() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(2 * RECEIVERS))  # each of them waits in a thread
        followers = [
            Receiver(
                stores[n], ram_path / f"mirror-{n}", base=policy.base, name=f"receiver-{n}", workers=0
            ).follow_async(lambda report, n=n: on_pull(n, report), until_version=VERSIONS, poll_interval_s=POLL_S)
            for n in range(RECEIVERS)
        ]
        await asyncio.gather(loop.run_in_executor(ThreadPoolExecutor(1), publish), *followers)

    begun = time.monotonic()
    with living_in(Swift()):
        asyncio.run(follow_all())
    seconds = time.monotonic() - begun
    for number in range(RECEIVERS):
        assert [report.version for report in seen[number]] == list(range(1, VERSIONS + 1))
        assert sum(report.wire_bytes for report in seen[number]) == sum(report.wire_bytes for report in sent)
    for number in (0, RECEIVERS // 2, RECEIVERS - 1):
        assert verify_directory(bucket, ram_path / f"mirror-{number}", workers=0).version == VERSIONS
    _require_predicted_traffic(sent, stores, seconds)


def _require_predicted_traffic(sent: list[PublishReport], stores: list[MeteredStore], seconds: float) -> None:
    """Bytes and requests of a receiver are what the capacity model says, and so are the polls that found nothing: one
    in ``poll_interval_s`` at most, which jitter shortens by a quarter."""
    work = Workload(
        dense_bytes=2 * CELLS,
        changed_ratio=sum(r.changed_elements for r in sent) / VERSIONS / CELLS,
        receivers=RECEIVERS,
        up_bytes_per_s=1e9,
        down_bytes_per_s=1e9,
        poll_interval_s=POLL_S,
    )
    predicted = predict(work, Rates())
    wanted = costs(work, predicted, Prices())
    for store in stores:
        traffic = store.meter.traffic
        down = traffic.down_bytes / VERSIONS
        assert abs(down - predicted.wire_bytes) <= 0.25 * predicted.wire_bytes
        useful = traffic.requests["read"] + VERSIONS
        assert useful <= 1.1 * VERSIONS * wanted.get_requests / RECEIVERS
        polls = traffic.requests["get"] - VERSIONS
        assert polls <= seconds / work.poll_interval_s / 0.75 + 8
        assert traffic.requests["list"] <= 8  # on opening only, never on the way


@pytest.fixture
def bad_network(tmp_path: Path) -> Iterator[tuple[SeaweedServer, FaultyProxy]]:
    """A real server behind a network in which one request in ten fails, is cut short, or loses its reply."""
    kinds = [FaultKind.UNAVAILABLE, FaultKind.SHORT_BODY, FaultKind.LOST_REPLY]
    with SeaweedServer() as server:
        server.create_bucket("faults")
        with FaultyProxy(server.endpoint_url, FaultPlan(seed=7, rate=0.1, kinds=kinds)) as proxy:
            yield server, proxy


def test_publishing_through_a_bad_network(
    bad_network: tuple[SeaweedServer, FaultyProxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No error reaches the user, and every version arrives."""
    import torch

    server, proxy = bad_network
    for name, value in {**server.environment, "AWS_ENDPOINT_URL_S3": proxy.endpoint_url}.items():
        monkeypatch.setenv(name, value)
    url = "s3://faults/run"
    policy = Policy(tmp_path, 300_000)
    init_run(url, policy.base, state_dir=tmp_path / "state", workers=0)
    pulled: list[int] = []
    receiver = Receiver(url, tmp_path / "mirror", base=policy.base, workers=0)
    follower = threading.Thread(
        target=receiver.follow,
        args=(lambda report: pulled.append(report.version),),
        kwargs={"until_version": 40, "poll_interval_s": 0.05},
    )
    follower.start()
    with Sender.open(url, state_dir=tmp_path / "state", fence=False, workers=0) as sender:
        for _ in range(40):
            cells = torch.from_numpy(policy.step()["w"].view(np.int16).copy()).view(torch.uint16)
            sender.publish({"w": cells})
    follower.join(timeout=120)
    assert pulled[-1] == 40
    assert pulled == sorted(set(pulled))
    assert len(proxy.plan.struck) >= 10
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint_url)
    assert verify_directory(url, tmp_path / "mirror", workers=0).version == 40


def test_a_server_that_restarts(tmp_path: Path) -> None:
    """Requests fail altogether for a while, as when a server restarts: follower and sender wait it out."""
    import torch

    plan = FaultPlan(seed=1, rate=1.0, kinds=[FaultKind.UNAVAILABLE])
    plan.enabled = False
    policy = Policy(tmp_path)
    with SeaweedServer() as server, FaultyProxy(server.endpoint_url, plan) as proxy:
        server.create_bucket("restart")
        address = server.address("restart", "run")
        direct = S3Store(address)
        init_run(direct, policy.base, state_dir=tmp_path / "state", workers=0)
        through = S3Store(type(address)(**{**address.__dict__, "endpoint_url": proxy.endpoint_url}))
        receiver = Receiver(through, tmp_path / "mirror", base=policy.base, workers=0)
        follower = threading.Thread(target=receiver.follow, kwargs={"until_version": 3, "poll_interval_s": 0.05})
        follower.start()
        with Sender.open(through, state_dir=tmp_path / "state", fence=False, workers=0) as sender:
            for version in range(3):
                cells = torch.from_numpy(policy.step()["w"].view(np.int16).copy()).view(torch.uint16)
                back = threading.Timer(2.0, setattr, (plan, "enabled", False))
                plan.enabled = version == 1
                back.start()
                sender.publish({"w": cells})
                back.join()
        follower.join(timeout=120)
        assert len(plan.struck) >= 1
        assert verify_directory(direct, tmp_path / "mirror", workers=0).version == 3
