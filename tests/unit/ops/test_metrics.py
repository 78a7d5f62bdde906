"""Prometheus metrics, served and written."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dcr_s3.errors import BadInput, Busy
from dcr_s3.metrics import Metrics
from dcr_s3.reports import PublishReport, PullReport

PULL = PullReport(
    version=7,
    from_version=6,
    step=70,
    changed_elements=10,
    total_elements=1000,
    wire_bytes=50,
    dense_bytes=2000,
    seconds={"fetch_decode": 0.5, "apply": 0.25, "total": 1.0},
    up_to_date=False,
)
NOTHING = PullReport(version=7, from_version=7, total_elements=1000, dense_bytes=2000, up_to_date=True)


def samples(text: str) -> dict[str, float]:
    """Value by name, with the labels that are neither run nor role."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            more = "".join(f"[{v}]" for k, v in sorted(sample.labels.items()) if k not in ("run", "role"))
            found[sample.name + more] = sample.value
    return found


def test_textfile_counts_over_processes(tmp_path: Path) -> None:
    path = tmp_path / "dcr.prom"
    for report in (PULL, NOTHING, PULL):
        metrics = Metrics("s3://bucket/run", "receiver")
        metrics.observe(report)
        metrics.write(path)
    failed = Metrics("s3://bucket/run", "receiver")
    failed.fail(Busy("x"))
    failed.write(path)
    found = samples(path.read_text())
    assert found["dcr_s3_refits_total"] == 2
    assert found["dcr_s3_wire_bytes_total"] == 100
    assert found["dcr_s3_looks_total"] == 1
    assert found["dcr_s3_errors_total[Busy]"] == 1
    assert found["dcr_s3_stage_seconds_total[apply]"] == 0.5
    assert found["dcr_s3_version"] == 7
    assert found["dcr_s3_step"] == 70
    assert found["dcr_s3_changed_ratio"] == 0.01
    assert [p.name for p in tmp_path.iterdir()] == ["dcr.prom"]


def test_served_over_http() -> None:
    metrics = Metrics("s3://bucket/run", "sender")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    metrics.serve(port)
    report = PublishReport(version=1, total_elements=10, dense_bytes=20, wire_bytes=3, seconds={"total": 0.2})
    metrics.observe(report)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
        found = samples(reply.read().decode())
    assert found["dcr_s3_refit_seconds_count"] == 1
    assert found["dcr_s3_refit_seconds_bucket[0.25]"] == 1
    with pytest.raises(BadInput, match=str(port)):
        metrics.serve(port)


def test_a_file_that_is_no_metrics_file(tmp_path: Path) -> None:
    path = tmp_path / "dcr.prom"
    path.write_text("{ not metrics")
    metrics = Metrics("s3://bucket/run", "receiver")
    metrics.observe(PULL)
    with pytest.raises(BadInput, match=r"dcr\.prom"):
        metrics.write(path)
