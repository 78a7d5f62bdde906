"""Prometheus metrics of publishing and pulling: served over HTTP, or left in a file for node_exporter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from dcr_s3.errors import BadInput, DcrError
from dcr_s3.reports import PublishReport, PullReport
from dcr_s3.world import world

Role = Literal["sender", "receiver"]

_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)


class Metrics:
    """One process's metrics about one run. All names begin with ``dcr_s3_``; labels are ``run`` and ``role``."""

    def __init__(self, run: str, role: Role) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"run": run, "role": role}
        names = [*self._labels]
        self._version = self._gauge("version", "Newest version published or held")
        self._step = self._gauge("step", "Training step of that version")
        self._changed = self._gauge("changed_ratio", "Share of elements changed by the last refit, 0 to 1")
        self._last_wire = self._gauge("last_wire_bytes", "Bytes moved by the last refit")
        self._dense = self._gauge("dense_bytes", "Bytes of one full copy")
        self._success = self._gauge("last_success_timestamp_seconds", "When it last worked, also with nothing new")
        self._refit = self._gauge("last_refit_timestamp_seconds", "When a version was last published or applied")
        self._refits = Counter("dcr_s3_refits", "Publications or pulls that moved data", names, registry=self.registry)
        self._wire = Counter("dcr_s3_wire_bytes", "Bytes moved", names, registry=self.registry)
        self._looks = Counter("dcr_s3_looks", "Times it was found that nothing is new", names, registry=self.registry)
        self._errors = Counter("dcr_s3_errors", "Errors by class", [*names, "error"], registry=self.registry)
        self._stages = Counter("dcr_s3_stage_seconds", "Busy time", [*names, "stage"], registry=self.registry)
        self._seconds = Histogram(
            "dcr_s3_refit_seconds", "Seconds of a refit", names, buckets=_SECONDS, registry=self.registry
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"dcr_s3_{name}", text, [*self._labels], registry=self.registry)

    def observe(self, report: PublishReport | PullReport) -> None:
        """Counts a publication or a pull."""
        now = world().time()
        self._success.labels(**self._labels).set(now)
        self._version.labels(**self._labels).set(report.version)
        if isinstance(report, PullReport) and report.up_to_date:
            self._looks.labels(**self._labels).inc()
            return
        if report.step is not None:
            self._step.labels(**self._labels).set(report.step)
        self._refit.labels(**self._labels).set(now)
        self._changed.labels(**self._labels).set(report.changed_elements / max(report.total_elements, 1))
        self._last_wire.labels(**self._labels).set(report.wire_bytes)
        self._dense.labels(**self._labels).set(report.dense_bytes)
        self._refits.labels(**self._labels).inc()
        self._wire.labels(**self._labels).inc(report.wire_bytes)
        for stage, seconds in report.seconds.items():
            if stage != "total":
                self._stages.labels(**self._labels, stage=stage).inc(seconds)
        self._seconds.labels(**self._labels).observe(report.seconds["total"])

    def fail(self, error: DcrError) -> None:
        """Counts an error by its class."""
        self._errors.labels(**self._labels, error=type(error).__name__).inc()

    def serve(self, port: int, host: str = "127.0.0.1") -> None:
        """Answers ``/metrics`` from a thread of its own until the process ends. Raises ``BadInput``."""
        try:
            start_http_server(port, host, self.registry)
        except OSError as error:
            raise BadInput(f"metrics port {host}:{port}: {error.strerror or error}; choose another one") from error

    def write(self, path: Path) -> None:
        """Writes all metrics to ``path`` at once, for node_exporter's textfile collector.

        Counters go on from what the file held, so that short runs add up. Raises ``BadInput`` if it cannot be written.
        """
        try:
            self._resume(path)
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            temporary.write_bytes(generate_latest(self.registry))
            temporary.chmod(0o644)
            temporary.replace(path)
        except (OSError, ValueError) as error:
            raise BadInput(f"{path}: metrics cannot be written ({error}); give another path or delete it") from error

    def _resume(self, path: Path) -> None:
        """Adds the counters of an earlier process; gauges that were not set now keep their earlier values."""
        if not path.exists():
            return
        families = {f.name: f for f in text_string_to_metric_families(path.read_text())}
        set_now = {(s.name, *sorted(s.labels.items())) for m in self.registry.collect() for s in m.samples}
        gauges = (self._step, self._changed, self._last_wire, self._dense, self._success, self._refit, self._version)
        for metric in (self._refits, self._wire, self._looks, self._errors, self._stages, *gauges):
            name = next(iter(metric.describe())).name
            for sample in families[name].samples if name in families else ():
                if isinstance(metric, Counter) and sample.name.endswith("_total"):
                    metric.labels(**sample.labels).inc(sample.value)
                elif isinstance(metric, Gauge) and (sample.name, *sorted(sample.labels.items())) not in set_now:
                    metric.labels(**sample.labels).set(sample.value)
