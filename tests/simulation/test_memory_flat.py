"""Whatever passes through the loops is forgotten: memory is flat over virtual time (an hour: benchmarks)."""

from __future__ import annotations

from paceline.core.config import build_config
from paceline.testing.memory_growth import blocks_over_time


def test_memory_is_flat_over_many_samples_and_versions() -> None:
    config = build_config(
        {
            "actor": {"ppo_mini_batch_size": 8},
            "async_training": {"staleness_threshold": 1.0, "trigger_parameter_sync_step": 2},
            "rollout": {"n": 2, "num_replicas": 4, "max_num_seqs": 16, "total_rollout_steps": 1_000_000},
        }
    )
    counts, samples = blocks_over_time(config, response_seconds=1.0, seconds=240.0, looks=6)
    assert samples > 4000
    early, late = min(counts[1:3]), min(counts[-2:])
    assert late - early < samples / 8  # one block kept per sample would be several times that
