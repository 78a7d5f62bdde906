"""From a workload and rates to seconds, bytes, requests and dollars."""

from __future__ import annotations

from math import ceil

from pydantic import BaseModel, ConfigDict, Field

from dcr_s3.planning.entropy import position_bits
from dcr_s3.planning.rates import Rates

SEGMENT_BYTES = 32 << 20
LEAST_SEGMENT_BYTES = 256 << 10
PART_BYTES = 8 << 20
_SEGMENT_OVERHEAD_BYTES = 300
_BLOCK_OVERHEAD_BYTES = 60
_BLOCK_DENSE_BYTES = 16 << 20
_MANIFEST_BYTES = 700
_ENTRY_BYTES = 260


class Workload(BaseModel):
    """A run and the machines it is for. Rates are bytes per second of one node; ratios go from 0 to 1."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dense_bytes: int = Field(gt=0)
    cell_bytes: int = Field(2, gt=0)
    changed_ratio: float = Field(0.01, ge=0, le=1)
    owners: int = Field(1, gt=0, description="trainer nodes that send, each its share")
    receivers: int = Field(1, gt=0, description="rollout nodes that each need every change")
    regions: int = Field(1, gt=0, description="regions with receivers, the bucket's own included; others have a relay")
    up_bytes_per_s: float = Field(gt=0)
    down_bytes_per_s: float = Field(gt=0)
    sharded: bool = Field(False, description="receivers hold shards of one replica, each fetching its part only")
    latency_s: float = Field(0.02, ge=0)
    owner_cores: int = Field(16, gt=0)
    receiver_cores: int = Field(16, gt=0)
    steps_per_day: float = Field(288.0, gt=0)
    poll_interval_s: float = Field(2.0, gt=0)
    bits_per_change: float | None = Field(None, gt=0)

    @property
    def changed(self) -> float:
        """Changed cells of a version."""
        return self.changed_ratio * self.dense_bytes / self.cell_bytes


class Prices(BaseModel):
    """Dollars. The defaults are list prices of AWS S3 Standard in us-east-1, November 2026."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    per_put: float = 0.005 / 1000
    per_get: float = 0.0004 / 1000
    per_gb_between_regions: float = 0.02
    per_gb_month: float = 0.023


class Refit(BaseModel):
    """One refit, from the first scan to the last receiver's last applied bit. ``seconds`` by stage is busy time; the
    stages overlap, so ``total`` is less than their sum."""

    wire_bytes: int
    segments: int
    seconds: dict[str, float]
    bound_by: str


class Costs(BaseModel):
    """Of one version, and of a day with idle polling."""

    put_requests: int
    get_requests: int
    between_regions_bytes: int
    dollars_per_step: float
    dollars_per_day: float


def predict(work: Workload, rates: Rates) -> Refit:
    """A refit through deltas, everything overlapped that is."""
    wire = _wire_bytes(work, rates)
    segments = _segments(work, wire)
    share = work.receivers if work.sharded else 1
    encode = work.dense_bytes / rates.encode_bytes_per_s + work.changed / rates.encode_changes_per_s
    decode = work.dense_bytes / rates.decode_bytes_per_s + work.changed / rates.decode_changes_per_s
    construct_s = encode / (work.owners * work.owner_cores)
    upload_s = wire / (work.owners * work.up_bytes_per_s)
    download_s = wire / share / work.down_bytes_per_s
    decode_s = decode / share / work.receiver_cores
    apply_s = work.changed / rates.apply_changes_per_s / share / work.receiver_cores
    stages = {"construct": construct_s, "upload": upload_s, "download": download_s, "decode": decode_s}
    bound_by = max(stages, key=lambda name: stages[name])
    # While one segment is fetched, the next is built: what stays visible is the slowest stage, one segment's way
    # through the others, the applying, and the round trips of the last upload, the commit, the look and the fetch.
    others = sum(stages.values()) - stages[bound_by]
    trips_s = 5 * work.latency_s + min(work.poll_interval_s, 0.2) / 2
    total = stages[bound_by] + others * work.owners / max(segments, work.owners) + apply_s + trips_s
    seconds = {name: round(s, 4) for name, s in {**stages, "apply": apply_s, "total": total}.items()}
    return Refit(wire_bytes=wire, segments=segments, seconds=seconds, bound_by=bound_by)


def predict_full_copy(work: Workload) -> Refit:
    """A full copy: uploaded as a whole, then downloaded as a whole."""
    share = work.receivers if work.sharded else 1
    upload_s = work.dense_bytes / (work.owners * work.up_bytes_per_s)
    download_s = work.dense_bytes / share / work.down_bytes_per_s
    segments = ceil(work.dense_bytes / SEGMENT_BYTES)
    seconds = {"upload": round(upload_s, 4), "download": round(download_s, 4)}
    total = round(upload_s + download_s + 2 * work.latency_s, 4)
    return Refit(
        wire_bytes=work.dense_bytes,
        segments=segments,
        seconds={**seconds, "total": total},
        bound_by="upload" if upload_s >= download_s else "download",
    )


def costs(work: Workload, refit: Refit, prices: Prices) -> Costs:
    """Requests and dollars of one version and of a day. Transfer inside a region is free; each region but the first
    takes one copy through its relay."""
    parts = ceil(refit.wire_bytes / PART_BYTES) if refit.wire_bytes > 2 * PART_BYTES * refit.segments else 0
    written = refit.segments + (parts + refit.segments if parts else 0) + 1
    fetched = max(ceil(refit.wire_bytes / PART_BYTES), refit.segments)
    puts = written * work.regions + work.receivers
    gets = (1 + fetched) * (work.receivers + work.regions - 1)
    between = refit.wire_bytes * (work.regions - 1)
    step = puts * prices.per_put + gets * prices.per_get + between / 1e9 * prices.per_gb_between_regions
    polls = 86400 / work.poll_interval_s * (work.receivers + work.regions - 1)
    stored = refit.wire_bytes * work.steps_per_day * work.regions / 1e9 * prices.per_gb_month / 30
    day = step * work.steps_per_day + polls * prices.per_get + stored
    return Costs(
        put_requests=puts,
        get_requests=gets,
        between_regions_bytes=between,
        dollars_per_step=round(step, 6),
        dollars_per_day=round(day, 4),
    )


def _wire_bytes(work: Workload, rates: Rates) -> int:
    bits = work.bits_per_change
    if bits is None:
        bits = position_bits(work.changed_ratio) + rates.value_bits
    payload = work.changed * bits / 8
    blocks = ceil(work.dense_bytes / _BLOCK_DENSE_BYTES) if work.changed else 0
    segments = _segments(work, int(payload))
    overhead = blocks * _BLOCK_OVERHEAD_BYTES + segments * (_SEGMENT_OVERHEAD_BYTES + _ENTRY_BYTES) + _MANIFEST_BYTES
    return int(payload + overhead)


def _segments(work: Workload, wire_bytes: int) -> int:
    """Segments end at 32 MiB or, from 256 KiB on, after a sixteenth of the owner's share."""
    if not work.changed:
        return 0
    each = wire_bytes / work.owners
    return work.owners * max(1, ceil(each / SEGMENT_BYTES), min(16, int(each / LEAST_SEGMENT_BYTES)))
