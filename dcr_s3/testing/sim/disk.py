"""One machine's disk: what survives a killed process, and what survives a power loss."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


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
    its durable content, or any mixture with what was written since.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files: dict[Path, _File] = {}
        self._folders: dict[Path, _Folder] = {}

    def digest(self) -> str:
        """Equal for equal content, as it is seen and as it would survive."""
        result = hashlib.md5(usedforsecurity=False)
        for path in sorted(p for p in self.root.rglob("*") if p.is_file()):
            result.update(repr((path.relative_to(self.root), path.read_bytes(), self._known(path).durable)).encode())
        for place, folder in sorted(self._folders.items()):
            names = [(name, file.durable) for name, file in sorted(folder.names.items())]
            since = [(name, file and file.durable) for name, file in folder.since]
            result.update(repr((place.relative_to(self.root), names, since)).encode())
        return result.hexdigest()

    def settle(self) -> None:
        """Takes everything that is there for durable."""
        self._files = {p: _File(p.read_bytes()) for p in sorted(self.root.rglob("*")) if p.is_file()}
        self._folders = {}
        for path, file in self._files.items():
            self._folder(path.parent).names[path.name] = file

    def sync(self, path: Path) -> None:
        """A file's content is durable now; whether its name is depends on the folder."""
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
