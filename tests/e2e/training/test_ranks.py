"""Real ranks: torchrun with gloo, real optimizer steps, published by shards, pulled and compared bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def launch(ranks: int, scenario: str, url: str, directory: Path) -> None:
    """Runs a scenario of ``worker.py`` on so many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(HERE / "worker.py"), scenario, url, str(directory)],
        env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def test_every_layout_on_four_ranks(moto_url: str, tmp_path: Path) -> None:
    launch(4, "versions:fsdp,hsdp,tp,fsdp_tp,ddp", moto_url, tmp_path)


def test_flat_parameters_on_two_ranks(moto_url: str, tmp_path: Path) -> None:
    launch(2, "versions:fsdp1,fsdp1_flat", moto_url, tmp_path)


def test_no_collective_moves_weights_and_a_torn_replica_is_named(moto_url: str, tmp_path: Path) -> None:
    launch(2, "quiet:fsdp,ddp;torn:ddp", moto_url, tmp_path)


def test_residual_conversions(moto_url: str, tmp_path: Path) -> None:
    launch(2, "residuals", moto_url, tmp_path)


def test_a_restart_with_fewer_ranks_and_another_layout(moto_url: str, tmp_path: Path) -> None:
    launch(4, "first_life:fsdp_tp", moto_url, tmp_path)
    launch(2, "second_life:fsdp", moto_url, tmp_path)


def test_a_rank_that_dies_while_publishing_is_named_and_nothing_is_committed(moto_url: str, tmp_path: Path) -> None:
    """Ranks started one by one, as no launcher would then stop the others."""
    rendezvous = tmp_path / "rendezvous"
    ranks = []
    for rank in range(3):
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": "3",
            "DCR_TEST_RENDEZVOUS": f"file://{rendezvous}",
        }  # fmt: skip
        command = [sys.executable, str(HERE / "worker.py"), "death", moto_url, str(tmp_path)]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    outputs = [process.communicate(timeout=200)[0].decode()[-4000:] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0, -signal.SIGKILL], "\n".join(outputs)


def test_megatron_layers_on_two_ranks(moto_url: str, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed (pip install dcr-s3[training])")
    launch(2, "megatron:untied,tied,few,experts", moto_url, tmp_path)
