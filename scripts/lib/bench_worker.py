"""The processes of bench_refit.py: makes the base, sends, or receives. One JSON command a line, one answer a line."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from dcr_s3 import Receiver, Sender
from dcr_s3.errors import NotFound
from dcr_s3.store import open_store

PART_BYTES = 16 << 20
THREADS = 8


def checkpoint_cells(path: Path) -> tuple[bytes, np.ndarray]:
    """A safetensors file's header, length field included, and its data as cells of 16 bits."""
    body = np.fromfile(path, np.uint8)
    start = 8 + int(body[:8].view("<u8")[0])
    return body[:start].tobytes(), body[start:].view(np.uint16)


def make_base(directory: Path, size_mb: int, trace: Path) -> None:
    """Copies of the trace's base, or of normally distributed weights, until the size is reached."""
    directory.mkdir(parents=True)
    source = trace / "base.safetensors"
    if not source.exists():
        bits = (np.random.default_rng(0).standard_normal(32 << 20, np.float32).view(np.uint32) >> 16).astype("<u2")
        entry = {"weight": {"dtype": "BF16", "shape": [32 << 20], "data_offsets": [0, bits.nbytes]}}
        header, data = json.dumps(entry), bits.tobytes()
    else:
        raw, cells = checkpoint_cells(source)
        header, data = raw[8:].decode(), cells.tobytes()
    tensors = {k: v for k, v in json.loads(header).items() if k != "__metadata__"}
    for number in range(max(1, round(size_mb * 1e6 / len(data)))):
        named = json.dumps({f"copy{number:03d}.{name}": entry for name, entry in tensors.items()}).encode()
        named += b" " * (-len(named) % 8)
        body = len(named).to_bytes(8, "little") + named + data
        (directory / f"model-{number:05d}.safetensors").write_bytes(body)


class Weights:
    """The sender's newest state: file by file, cells in memory."""

    def __init__(self, base: Path, trace: Path) -> None:
        self.files = sorted(base.glob("*.safetensors"))
        self.headers, self.cells = zip(*(checkpoint_cells(f) for f in self.files), strict=True)
        self._trace = trace
        self._steps = 0

    def prepare(self, changed: str) -> None:
        """Moves on: by a recorded optimizer step for ``real``, else by one step up or down at random places."""
        self._steps += 1
        for number, cells in enumerate(self.cells):
            if changed == "real":
                self._real_step(self.headers[number], cells)
            else:
                random = np.random.default_rng([self._steps, number])
                places = random.random(cells.size, np.float32) < float(changed)
                cells[places] += np.where(random.random(int(places.sum())) < 0.5, 1, 65535).astype(np.uint16)

    def _real_step(self, header: bytes, cells: np.ndarray) -> None:
        entries = json.loads(header[8:])
        with np.load(self._trace / f"lr5e-6_step{self._steps}.npz") as step:
            for name, entry in entries.items():
                short = name.partition(".")[2]
                if f"I/{short}" in step.files:
                    begin, end = (offset // 2 for offset in entry["data_offsets"])
                    cells[begin:end][np.cumsum(step[f"I/{short}"], dtype=np.int64)] = step[f"V/{short}"]

    def tensors(self) -> Iterator[tuple[str, Any]]:
        import torch

        for header, cells in zip(self.headers, self.cells, strict=True):
            for name, entry in json.loads(header[8:]).items():
                begin, end = (offset // 2 for offset in entry["data_offsets"])
                yield name, torch.from_numpy(cells[begin:end].view(np.int16)).view(torch.bfloat16).view(entry["shape"])


def data_digest(files: list[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for cells in files:
        digest.update(cells)
    return digest.hexdigest()


def answer(**data: Any) -> None:
    print(json.dumps(data), flush=True)


def commands() -> Iterator[str]:
    for line in sys.stdin:
        command = json.loads(line)
        yield command["act"] if command["act"] != "prepare" else f"prepare {command['changed']}"


def send(url: str, base: Path, coding: str, trace: Path) -> None:
    """Publishes what ``prepare`` made; or copies all of it."""
    use(coding)
    weights = Weights(base, trace)
    store = open_store(url)
    with Sender.open(url, base=base) as sender:
        answer(ready=True)
        for act in commands():
            if act.startswith("prepare"):
                weights.prepare(act.split()[1])
                answer(ready=True)
            elif act == "publish":
                states = dict(weights.tensors())
                begun_at = time.time()
                report = sender.publish(states)
                answer(begun_at=begun_at, **report.model_dump())
            elif act == "digest":
                answer(sha256=data_digest(list(weights.cells)))
            else:
                begun_at = time.time()
                wire_bytes = upload_all(store, weights, streamed=act == "copy-streamed")
                answer(begun_at=begun_at, ended_at=time.time(), wire_bytes=wire_bytes)


def upload_all(store: Any, weights: Weights, *, streamed: bool) -> int:
    """Every file as an object of its own; streamed: in compressed pieces that can be fetched one by one."""
    if streamed:
        pieces = [(f, p) for f, cells in enumerate(weights.cells) for p in range(-(-cells.nbytes // PART_BYTES))]

        def put(piece: tuple[int, int]) -> int:
            cells = weights.cells[piece[0]][piece[1] * PART_BYTES // 2 : (piece[1] + 1) * PART_BYTES // 2]
            planes = np.ascontiguousarray(cells.view(np.uint8).reshape(-1, 2).T)
            body = bytearray(zstandard.ZstdCompressor(level=1).compress(planes))
            store.put(f"full/{piece[0]}/{piece[1]}", body)
            return len(body)

        with ThreadPoolExecutor(THREADS) as pool:
            return sum(pool.map(put, pieces))
    uploads = [store.open_multipart(f"full/{n}") for n in range(len(weights.cells))]
    parts = [(n, p) for n, cells in enumerate(weights.cells) for p in range(-(-cells.nbytes // PART_BYTES))]

    def put_part(part: tuple[int, int]) -> None:
        cells = weights.cells[part[0]][part[1] * PART_BYTES // 2 : (part[1] + 1) * PART_BYTES // 2]
        uploads[part[0]].upload_part(part[1] + 1, bytearray(memoryview(cells).cast("B")))

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(put_part, parts))
    for upload in uploads:
        upload.complete()
    return sum(cells.nbytes for cells in weights.cells)


def receive(url: str, base: Path, coding: str, mirror: Path, follow: bool) -> None:
    """Follows, or pulls when told; answers with one report for each version."""
    use(coding)
    receiver = Receiver(url, mirror, base=base, name=mirror.name)
    receiver.pull()
    stop = threading.Event()
    follower = threading.Thread(target=follow_or_end, args=(receiver, stop))
    answer(ready=True)
    if follow:
        follower.start()
    store = open_store(url)
    files = sorted(base.glob("*.safetensors"))
    for act in commands():
        if act == "pull":
            answer(**receiver.pull().model_dump())
        elif act == "digest":
            mirrored = [mirror / f.name for f in files]
            answer(sha256=data_digest([checkpoint_cells(f)[1] for f in mirrored]))
        elif act == "stop":
            stop.set()
            follower.join()
            answer(ready=True)
        else:
            download_all(store, files, mirror, streamed=act == "copy-streamed")
            answer(applied_at=time.time())
    stop.set()
    if follower.is_alive():
        follower.join()


def follow_or_end(receiver: Receiver, stop: threading.Event) -> None:
    """Follows; an error ends the process, so that nobody waits for it."""
    try:
        receiver.follow(lambda report: answer(**report.model_dump()), stop, poll_interval_s=0.1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def download_all(store: Any, files: list[Path], mirror: Path, *, streamed: bool) -> None:
    """Into the mirror's files, in pieces."""
    targets = []
    for file in files:
        header, _ = checkpoint_cells(mirror / file.name)
        targets.append(np.memmap(mirror / file.name, np.uint8, "r+", offset=len(header)))
    pieces = [(f, p) for f, target in enumerate(targets) for p in range(-(-target.nbytes // PART_BYTES))]

    def fetch(piece: tuple[int, int]) -> None:
        view = targets[piece[0]][piece[1] * PART_BYTES : (piece[1] + 1) * PART_BYTES]
        if not streamed:
            store.read_into(f"full/{piece[0]}", piece[1] * PART_BYTES, memoryview(view))
            return
        body = wait_for(store, f"full/{piece[0]}/{piece[1]}")
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(body), np.uint8).reshape(2, -1)
        view.reshape(-1, 2)[:] = planes.T

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(fetch, pieces))


def wait_for(store: Any, key: str) -> bytes:
    while True:
        try:
            return store.get(key, limit_bytes=2 * PART_BYTES).body
        except NotFound:
            time.sleep(0.05)


def use(coding: str) -> None:
    """Puts 16-bit gaps, XOR values and zstd -1 in place of the package's coding, on both sides of the pipeline."""
    if coding != "gaps":
        return
    from dcr_s3 import replay
    from dcr_s3.delta import codec, kernels
    from dcr_s3.delta.changes import Changes, joined, total_cells
    from dcr_s3.format.codings import Coding
    from dcr_s3.sending import blocks

    def encode(dtype: Any, old: Any, new: Any, *, context: bool) -> Any:
        changes = kernels.active().scan(old, new, dtype.cell_bytes, 0.03)
        if not len(changes.positions):
            return codec.EncodedBlock(Coding.NONE, b"", changes)
        gaps = np.diff(changes.positions, prepend=np.uint32(0))
        wide = int(gaps.max()) > 0xFFFF
        body = gaps.astype("<u4" if wide else "<u2").tobytes() + (changes.old ^ changes.new).tobytes()
        payload = bytes([wide]) + zstandard.ZstdCompressor(level=1).compress(body)
        return codec.EncodedBlock(Coding.DENSE_XOR, payload, changes)

    def decode(dtype: Any, coding: Any, payload: Any, changed: int, old: Any) -> Any:
        body = zstandard.ZstdDecompressor().decompress(bytes(payload[1:]))
        gap_bytes = changed * (4 if payload[0] else 2)
        gaps = np.frombuffer(body, "<u4" if payload[0] else "<u2", changed)
        positions = np.cumsum(gaps, dtype=np.uint32)
        before = joined(old, dtype.cell_bytes)
        assert len(before) == total_cells(old)
        values = before[positions]
        xor = np.frombuffer(body, values.dtype, changed, gap_bytes)
        return Changes(positions, values, values ^ xor)

    assert hasattr(blocks, "encode_block") and hasattr(replay, "decode_block")
    blocks.encode_block = encode
    replay.decode_block = decode


def main() -> None:
    role, *rest = sys.argv[1:]
    if role == "base":
        shutil.rmtree(rest[0], ignore_errors=True)
        make_base(Path(rest[0]), int(rest[1]), Path(rest[2]))
    elif role == "sender":
        send(rest[0], Path(rest[1]), rest[2], Path(rest[3]))
    else:
        receive(rest[0], Path(rest[1]), rest[2], Path(rest[3]), rest[4] == "1")


if __name__ == "__main__":
    main()
