"""vLLM's weight-transfer backend ``dcr_s3``. Imported by vLLM only."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from dcr_s3.errors import BadInput
from dcr_s3.ranks import LocalRank
from dcr_s3.resident import ResidentReceiver
from dcr_s3.vllm.worker import rank_of


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """``run``: the run's address. ``base``: checkpoint directory that vLLM was started from, by default its model.
    ``pause_limit_s`` bounds the writing of one version. ``nearby``: addresses of copies to read from first.
    """

    run: str
    base: str = ""
    pause_limit_s: float = 30.0
    nearby: list[str] = field(default_factory=list)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """``version``: the one to write. Several ranks must have staged it; one rank alone fetches it now, and None then
    means the newest. ``verify``: read back what was written.
    """

    version: int | None = None
    verify: bool = True


class DcrWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Writes versions of a run into one worker's model, in place."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Binds this worker's model to the run. Which version it holds is proved by whoever drives it, or, if it is
        alone and nobody does, with the first update.
        """
        base = init_info.base or self.model_config.model
        self._rank = rank_of(self.model, self.parallel_config.rank)
        self._rank.open(init_info.run, base, init_info.pause_limit_s, init_info.nearby)
        self._alone: ResidentReceiver | None = None
        if self.parallel_config.world_size == 1:
            self._alone = ResidentReceiver(
                init_info.run,
                LocalRank(self._rank),
                base,
                pause_limit_s=init_info.pause_limit_s,
                nearby=init_info.nearby,
            )

    def start_weight_update(self) -> None:
        """Nothing to prepare: weights are written in place."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Writes the version. Raises ``DcrError``; the model is then as before, or its rank is marked unfit."""
        version = update_info.version
        if version is not None and self._rank.status()["staged"] == version:
            self._rank.apply(version, update_info.verify)
        elif self._alone is not None:
            self._alone.pull(to_version=version)
            if version is not None and self._alone.version != version:
                raise BadInput(f"version {version} was asked for, but the engine holds {self._alone.version} already")
        else:
            raise BadInput(
                "several ranks must stage a version before it is written; let `dcr-s3 follow --vllm` drive them"
            )

    def finish_weight_update(self) -> None:
        """Nothing to finish."""

    def shutdown(self) -> None:
        """Nothing is held open."""
