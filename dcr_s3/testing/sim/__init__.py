"""A simulator: the real sender and receiver on a memory store, under virtual time and one seed that decides all."""

from dcr_s3.testing.sim.scenarios import Tiny, explore_tiny, joint_scenario, run_seed
from dcr_s3.testing.sim.simulation import Violation

__all__ = ["Tiny", "Violation", "explore_tiny", "joint_scenario", "run_seed"]
