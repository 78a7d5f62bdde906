"""Copies a checkpoint directory, so that the copy can become a mirror."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dcr_s3.errors import BadInput
from dcr_s3.targets.checkpoint import Checkpoint
from dcr_s3.targets.disk import disk_errors
from dcr_s3.targets.state import STATE_FILE
from dcr_s3.workers import Progress, no_progress
from dcr_s3.world import world

_CHUNK_BYTES = 16 << 20
_OTHER_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack", ".h5", ".onnx"}


def companion_files(checkpoint: Checkpoint) -> Iterator[Path]:
    """What belongs to a checkpoint beside its tensor files: configuration, tokenizer, index; no other copies of
    weights.
    """
    for path in sorted(checkpoint.directory.iterdir()):
        hidden = path.name.startswith(".") or path.name == STATE_FILE
        if path.is_file() and not hidden and path.suffix not in _OTHER_WEIGHTS:
            yield path


def copy_checkpoint(source: Checkpoint, directory: Path, progress: Progress = no_progress) -> None:
    """Copies tensor files and companions into ``directory``, which may exist but may not hold other tensor files.

    Real copies: a file that shares blocks with another one could run out of space when it is later changed in place.
    Raises ``DiskFull``, ``BadInput``.
    """
    tensor_files = [source.directory / name for name in source.tensor_files]
    others = {p.name for p in directory.glob("*.safetensors")} - {p.name for p in tensor_files}
    if others:
        raise BadInput(f"{directory}: holds {sorted(others)[0]}, which is not part of the base; use an empty directory")
    files = [*tensor_files, *companion_files(source)]
    total = sum(f.stat().st_size for f in files)
    done = 0
    with disk_errors(directory):
        for file in files:
            done = _copy_file(file, directory / file.name, done, total, progress)
        world().sync_directory(directory)


def _copy_file(source: Path, target: Path, done: int, total: int, progress: Progress) -> int:
    with source.open("rb") as reader, target.open("wb") as writer:
        while chunk := reader.read(_CHUNK_BYTES):
            writer.write(chunk)
            done += len(chunk)
            progress("copy", done, total)
        world().sync(writer)
    return done
