"""The dashboard in a real browser, and what it is made of."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dcr_s3 import Receiver, Sender, init_run
from dcr_s3.cli.app import run
from dcr_s3.cli.serving import make_page, read_reports, serve_page
from dcr_s3.dashboard.heatmap import colour, heatmap_svg
from dcr_s3.difference import compare
from dcr_s3.errors import BadInput
from dcr_s3.store import open_store

URL = "memory://dashboard-test/run"


def write_checkpoint(directory: Path, seed: int) -> Path:
    directory.mkdir(parents=True)
    tensors = {}
    for layer in range(3):
        for part, size in (("self_attn.q_proj.weight", 4000), ("mlp.up_proj.weight", 9000)):
            cells = np.random.default_rng(layer).integers(0, 1 << 16, size, np.uint16)
            cells[: seed * 10 * (layer + 1)] ^= 1
            tensors[f"model.layers.{layer}.{part}"] = cells
    tensors["model.norm.weight"] = np.ones(64, np.uint16)
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with four versions and two receivers, one behind; the reports of all of it."""
    home = tmp_path_factory.mktemp("dashboard")
    store = open_store(URL)
    base = write_checkpoint(home / "base", 0)
    init_run(store, base, upload_base=True, state_dir=home / "state", workers=0)
    lines = []
    with Sender.open(store, state_dir=home / "state", fence=False, workers=0) as sender:
        for seed in range(1, 5):
            lines.append(sender.publish(write_checkpoint(home / f"new-{seed}", seed), step=10 * seed))
            if seed == 2:
                Receiver(store, home / "late", base=base, name="late", workers=0).pull()
        lines.append(Receiver(store, home / "mirror", base=base, name="in-time", workers=0).pull())
    path = home / "reports.jsonl"
    path.write_text("".join(line.model_dump_json() + "\n" for line in lines))
    return path


def browser() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-headless-shell") or shutil.which("google-chrome")


def browse(url: str, home: Path, *what: str) -> str:
    """What a headless browser prints; fails if the page logged anything."""
    program = browser()
    if program is None:
        pytest.skip("no Chromium (Debian: apt-get install chromium-headless-shell)")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    flags += ["--disable-background-networking", "--disable-component-update", "--enable-logging=stderr", "--v=0"]
    flags += [f"--user-data-dir={home / 'profile'}", "--virtual-time-budget=2000"]
    done = subprocess.run([program, *flags, *what, url], capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


@pytest.fixture
def served(reports: Path) -> Iterator[str]:
    stop = threading.Event()
    serving = serve_page(URL, port=0, last=100, reports=[reports], stop=stop)
    yield f"http://{next(serving)}/"
    stop.set()
    assert list(serving) == []


def test_the_page_in_a_browser(served: str, tmp_path: Path) -> None:
    dom = browse(served, tmp_path, "--dump-dom")
    assert dom.count('class="version"') == 4
    assert dom.count('class="receiver"') == 2
    assert "1 of 2" in dom  # receivers at the newest version
    assert dom.count('class="bar"') >= 4 + 4 + 3 + 5
    assert "version 4: 120 of 39,064 elements (0.307 %)" in dom
    assert "full copy" in dom
    assert "publish scan_encode" in dom
    assert "pull apply" in dom


def test_the_page_looks_like_something(served: str, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    browse(served, tmp_path, f"--screenshot={picture}", "--window-size=1000,1700")
    body = picture.read_bytes()
    assert body.startswith(b"\x89PNG")
    assert int.from_bytes(body[16:20], "big") == 1000
    assert len(body) > 30_000  # an empty page compresses to far less


def test_the_page_asks_for_nothing_else(reports: Path) -> None:
    page = make_page(URL, last=100, reports=[reports])
    assert "<script" not in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page
    assert "refresh" not in page


def test_the_page_says_what_is_wrong(tmp_path: Path) -> None:
    stop = threading.Event()
    serving = serve_page("memory://dashboard-test/nothing", port=0, last=10, reports=[], stop=stop)
    with pytest.raises(urllib.error.HTTPError, match="503") as refused:
        urllib.request.urlopen(f"http://{next(serving)}/")
    assert "RunMissing" in refused.value.read().decode()
    stop.set()
    assert list(serving) == []
    (tmp_path / "r.jsonl").write_text('{"version": 1}\n')
    with pytest.raises(BadInput, match="line 1"):
        read_reports(tmp_path / "r.jsonl")


def test_written_to_a_file(reports: Path, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    assert run(["dashboard", URL, "--output", str(output), "--reports", str(reports)]) == 0
    assert output.read_text().startswith("<!doctype html>")


def test_diff_as_json_and_as_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_checkpoint(tmp_path / "a", 0), write_checkpoint(tmp_path / "b", 3)
    assert run(["diff", str(a), str(b), "--json", "--svg", str(tmp_path / "map.svg")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["changed_elements"] == 2 * 30 * (1 + 2 + 3)
    third = next(t for t in found["tensors"] if t["name"] == "model.layers.2.mlp.up_proj.weight")
    assert (third["layer"], third["part"], third["changed_elements"]) == (2, "mlp.up_proj.weight", 90)
    picture = (tmp_path / "map.svg").read_text()
    assert picture.count("<title>") == 7
    assert "layer 2" in picture
    assert "model.norm.weight: 0 of 64" in picture
    dom = browse(f"file://{tmp_path / 'map.svg'}", tmp_path, "--dump-dom")
    assert dom.count("<rect") == picture.count("<rect")


def test_diff_compares_bits(tmp_path: Path) -> None:
    for name, value in (("a", 0.0), ("b", -0.0)):
        (tmp_path / name).mkdir()
        save_file({"w": np.array([value, np.nan], np.float32)}, tmp_path / name / "model.safetensors")
    assert compare(tmp_path / "a", tmp_path / "b", workers=0).changed_elements == 1
    (tmp_path / "c").mkdir()
    save_file({"v": np.zeros(2, np.float32)}, tmp_path / "c" / "model.safetensors")
    with pytest.raises(BadInput, match="lacks tensor w"):
        compare(tmp_path / "a", tmp_path / "c", workers=0)


def test_heat_goes_by_the_logarithm() -> None:
    shades = [colour(ratio) for ratio in (0.0, 1e-6, 1e-4, 1e-2, 1.0)]
    assert len(set(shades)) == 5
    assert shades[0] == "#eceef1"
    assert shades[-1] == "#08306b"


def test_an_empty_difference_is_drawn(tmp_path: Path) -> None:
    a = write_checkpoint(tmp_path / "a", 0)
    assert "0 of 39,064 elements differ (0 %)" in heatmap_svg(compare(a, a, workers=0))
