"""Real text that every Python installation has: the language reference and the standard library's docstrings."""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_WORD = re.compile(rb"[A-Za-z]+")


def corpus(limit_bytes: int = 1_000_000) -> bytes:
    """English prose about Python, ASCII, at most ``limit_bytes``; the same on every run of one installation."""
    pieces: list[bytes] = []
    size_bytes = 0
    for text in _documents():
        piece = text.encode("ascii", "ignore") + b"\n\n"
        pieces.append(piece)
        size_bytes += len(piece)
        if size_bytes >= limit_bytes:
            break
    return b"".join(pieces)[:limit_bytes]


def _documents() -> Iterator[str]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, OSError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                docstring = ast.get_docstring(node)
                if docstring and len(docstring) > 80:
                    yield docstring


def vocabulary(text: bytes) -> frozenset[bytes]:
    """Words of two letters and more, in lower case, that stand in ``text`` at least three times."""
    counts: dict[bytes, int] = {}
    for word in _WORD.findall(text.lower()):
        counts[word] = counts.get(word, 0) + 1
    return frozenset(word for word, count in counts.items() if count >= 3 and len(word) >= 2)


def reward(completion: bytes, words: frozenset[bytes]) -> float:
    """Share of ``completion``'s bytes that belong to known words, 0 to 1, without the last one: it may be cut off."""
    whole = completion[: completion.rfind(b" ") + 1].lower()
    return sum(len(word) for word in _WORD.findall(whole) if word in words) / max(len(completion), 1)
