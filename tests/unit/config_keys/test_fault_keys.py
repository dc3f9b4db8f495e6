"""Keys of what is done about faults."""

from __future__ import annotations

import pytest

from paceline.core.config import Config
from paceline.core.events import ResponsesAborted, SyncAborted
from paceline.core.sample import Prompt, SamplingParams
from paceline.rollout.groups import Groups
from paceline.testing.fault_plan import PlannedFault
from paceline.testing.simulation import SimulationReport, run_schedule
from tests.simulation.replica_rig import ReplicaRig, request, with_replicas
from tests.simulation.supervised import supervise
from tests.unit.config_keys.keys import config_with, shows

SMALL = {
    "actor.ppo_mini_batch_size": 2,
    "rollout.n": 2,
    "rollout.total_rollout_steps": 8,
    "rollout.max_num_seqs": 4,
    "async_training.trigger_parameter_sync_step": 1,
}


def run_with_failing_captures(config: Config) -> SimulationReport:
    """The second and the third snapshot fail."""
    faults = [PlannedFault("capture", "raise", "before", call) for call in (2, 3)]
    return run_schedule(1, supervise, config=config, faults=faults)


@shows("checkpoint_engine.sync_attempts")
def test_an_aborted_sync_is_tried_so_often() -> None:
    twice = run_with_failing_captures(config_with({**SMALL, "checkpoint_engine.sync_attempts": 2}))
    thrice = run_with_failing_captures(config_with({**SMALL, "checkpoint_engine.sync_attempts": 3}))
    assert twice.error == "InjectedFault: injected: raise before capture #3"
    assert thrice.error == ""
    assert sum(isinstance(event, SyncAborted) for event in thrice.events) == 2


@shows("rollout.drain_timeout_seconds")
def test_a_sequence_has_so_long_to_end_under_its_old_version() -> None:
    def aborted(seconds: float) -> int:
        counts: list[int] = []

        async def scenario(rig: ReplicaRig) -> None:
            await rig.sync(1)
            await rig.exchange(request("a", [1, 2], tokens=20))
            await rig.until_tokens(3)
            await rig.sync(2)
            await rig.finish("a")
            counts.append(len(rig.events.of(ResponsesAborted)))

        drain = config_with({"rollout.drain_timeout_seconds": seconds}).rollout.drain_timeout_seconds
        with_replicas(scenario, lambda clock: ReplicaRig(clock, partial_rollout=False, drain_seconds=drain))
        return counts[0]

    assert aborted(0.05) == 1
    assert aborted(60.0) == 0


@shows("rollout.max_model_len")
@pytest.mark.parametrize(("longest", "budget"), [(None, 10), (16, 8)])
def test_a_response_ends_with_the_context(longest: int | None, budget: int) -> None:
    config = config_with(
        {"rollout.max_model_len": longest, "data.max_prompt_length": 8, "data.max_response_length": 10}
    )
    params = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=10, stop_token_ids=())
    groups = Groups(responses=1, params=params, longest=config.max_model_len)
    (sent,) = groups.open("1-1", Prompt("p", "?", tuple(range(8)), "", "t"))
    assert sent.params.max_tokens == budget
