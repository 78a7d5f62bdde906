"""One machine's disk: what survives a killed process, and what survives a power loss."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dcr_s3.format.document import SEAL_BYTES, seal


@dataclass(eq=False)
class _File:
    """A file's content as last made durable; None: never."""

    durable: bytes | None = None


@dataclass
class _Folder:
    """Names as last made durable, and the changes since, in order. A change maps a name to a file, or to None."""

    names: dict[str, _File] = field(default_factory=dict)
    since: list[tuple[str, _File | None]] = field(default_factory=list)


class SimDisk:
    """Follows what the product makes durable below ``root``, where the real files are what a running process sees.

    After a power loss each folder has its durable names plus some of the changes since, the earliest first; a file has
    its durable content, or any mixture with what was written since. Files elsewhere do not outlive their process.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files: dict[Path, _File] = {}
        self._folders: dict[Path, _Folder] = {}

    def digest(self, boot_id: str) -> str:
        """Equal for what means the same to this boot, as it is seen and as it would survive."""
        here = boot_id.encode()
        result = hashlib.md5(usedforsecurity=False)
        for path in sorted(p for p in self.root.rglob("*") if p.is_file()):
            seen, durable = _meaning(path.read_bytes(), here), _meaning(self._known(path).durable, here)
            result.update(repr((path.relative_to(self.root), seen, durable)).encode())
        for place, folder in sorted(self._folders.items()):
            names = [(name, _meaning(file.durable, here)) for name, file in sorted(folder.names.items())]
            since = [(name, file and (_meaning(file.durable, here),)) for name, file in folder.since]
            result.update(repr((place.relative_to(self.root), names, since)).encode())
        return result.hexdigest()

    def durable_digest(self, boot_id: str) -> str:
        """The same of what is left by a power loss that takes all it can, to the boot after it."""
        here = boot_id.encode()
        kept = [
            (str(place / name), _meaning(file.durable or b"", here))
            for place, folder in self._folders.items()
            for name, file in folder.names.items()
        ]
        return hashlib.md5(repr(sorted(kept)).encode(), usedforsecurity=False).hexdigest()

    def settle(self) -> None:
        """Takes everything that is there for durable."""
        self._files = {p: _File(p.read_bytes()) for p in sorted(self.root.rglob("*")) if p.is_file()}
        self._folders = {}
        for path, file in self._files.items():
            self._folder(path.parent).names[path.name] = file

    def sync(self, path: Path) -> None:
        """A file's content is durable now; whether its name is depends on the folder."""
        if not path.is_relative_to(self.root):
            return
        self._known(path).durable = path.read_bytes()

    def sync_folder(self, path: Path) -> None:
        """Names in a folder are durable now."""
        here = sorted(p for p in path.iterdir() if p.is_file())
        self._folders[path] = _Folder({p.name: self._known(p) for p in here})

    def replace(self, source: Path, target: Path) -> None:
        """``source`` was renamed to ``target``. The renaming of a folder counts as durable at once."""
        if target.is_dir():
            self._files = {_moved(p, source, target): f for p, f in self._files.items()}
            self._folders = {_moved(p, source, target): f for p, f in self._folders.items()}
            return
        file = self._files.pop(source, None) or _File()
        self._files[target] = file
        self._folder(source.parent).since.append((source.name, None))
        self._folder(target.parent).since.append((target.name, file))

    def unlink(self, path: Path) -> None:
        """``path`` was deleted."""
        if not path.is_relative_to(self.root):
            return
        self._files.pop(path, None)
        self._folder(path.parent).since.append((path.name, None))

    def lose_power(self, choose: Callable[[int], int]) -> None:
        """Leaves on disk what a power loss might. ``choose(n)`` decides: 0 to n - 1."""
        here = sorted(p for p in self.root.rglob("*") if p.is_file())
        written = {self._known(p): p.read_bytes() for p in here}
        survivors: dict[Path, bytes] = {}
        for place, folder in sorted(self._folders.items()):
            names: dict[str, _File] = dict(folder.names)
            for name, file in folder.since[: choose(len(folder.since) + 1)]:
                if file is None:
                    names.pop(name, None)
                else:
                    names[name] = file
            for name, file in sorted(names.items()):
                survivors[place / name] = _content(file, written.get(file), choose)
        for path in here:
            path.unlink()
        for path, content in survivors.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        self.settle()

    def _known(self, path: Path) -> _File:
        if path not in self._files:
            file = self._files[path] = _File()
            self._folder(path.parent).since.append((path.name, file))
        return self._files[path]

    def _folder(self, path: Path) -> _Folder:
        return self._folders.setdefault(path, _Folder())


def _moved(path: Path, source: Path, target: Path) -> Path:
    return target / path.relative_to(source) if path.is_relative_to(source) else path


_BOOT = re.compile(rb'(?<="boot_id":")[^"]*')


def _meaning(content: bytes | None, boot_id: bytes) -> bytes | None:
    """Content in which it shows only whether the boot it names is this one. A document's seal says no more."""
    if content is None or b'"boot_id"' not in content:
        return content
    body = content[:-SEAL_BYTES]
    sealed = content[-SEAL_BYTES:] == seal(body)
    said = _BOOT.sub(lambda found: b"this" if found[0] == boot_id else b"earlier", body if sealed else content)
    return said + b"sealed" if sealed else said


_SECTOR_BYTES = 16
"""So small that even tiny files are torn in the middle."""


def _content(file: _File, written: bytes | None, choose: Callable[[int], int]) -> bytes:
    durable = file.durable
    if written is None or written == durable:
        return durable or b""
    if durable is None or len(durable) != len(written):
        return [durable or b"", written[: len(written) // 2], written][choose(3)]
    sectors = range(0, len(written), _SECTOR_BYTES)
    changed = [s for s in sectors if durable[s : s + _SECTOR_BYTES] != written[s : s + _SECTOR_BYTES]]
    kept = {s for s in changed if choose(2)}
    return b"".join((written if s in kept else durable)[s : s + _SECTOR_BYTES] for s in sectors)
