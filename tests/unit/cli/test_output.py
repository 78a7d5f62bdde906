"""Figures for people."""

from __future__ import annotations

import pytest

from dcr_s3.cli.output import Output, percent, ratio, size


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 0, "0 %"), (0, 10, "0 %"), (1, 1000, "0.1 %"), (1234, 100_000, "1.23 %"), (1, 1, "100 %")],
)
def test_percent(part: int, whole: int, text: str) -> None:
    assert percent(part, whole) == text


@pytest.mark.parametrize(
    ("dense", "wire", "text"), [(1000, 500, "2.0x"), (123_456, 100, "1,235x"), (50, 100, "0.5x"), (7, 0, "7.0x")]
)
def test_ratio(dense: int, wire: int, text: str) -> None:
    assert ratio(dense, wire) == text


def test_size_is_decimal() -> None:
    assert size(68_502_208) == "68.5 MB"


def test_markup_in_names_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output()
    out.note("[red]tensor[0][/red]")
    out.result({}, "[bold]x[/bold]")
    printed = capsys.readouterr()
    assert printed.err == "[red]tensor[0][/red]\n"
    assert printed.out == "[bold]x[/bold]\n"
