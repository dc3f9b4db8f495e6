"""Keys of responses that cannot be made; replicas that are moved by hand, on the virtual clock."""

from __future__ import annotations

from tests.simulation.sample_world import SampleWorld
from tests.unit.config_keys.keys import shows


def world(**rollout: object) -> SampleWorld:
    made = SampleWorld(
        {
            "actor": {"ppo_mini_batch_size": 2},
            "async_training": {"staleness_threshold": 0, "trigger_parameter_sync_step": 1},
            "rollout": {"n": 3, "total_rollout_steps": 8, **rollout},
        }
    )
    made.capture()
    made.publish()
    return made


@shows("rollout.group_policy")
def test_a_group_ends_or_goes_on_without_a_response_that_is_refused() -> None:
    def fate(policy: str) -> tuple[int, int]:
        """Samples that failed, and responses of the first one that is trained."""
        run = world(group_policy=policy)
        for replica, request_id in run.held():
            replica.finish(request_id, "error" if request_id == "1-1/0~0" else "stop")
        run.settle()
        for replica, request_id in run.held():  # of what takes the place of a sample that failed
            replica.finish(request_id)
        run.train()
        failed = run.statistics()[0].failed
        sizes = {one.sample.sample_id: len(one.sample.responses) for one in run.trained}
        run.close()
        return failed, sizes.get("1-1", 0)

    assert fate("retry") == (1, 0)
    assert fate("survivors") == (0, 2)


@shows("rollout.sample_timeout_seconds")
def test_a_sample_is_in_flight_no_longer_than_allowed() -> None:
    def failed_after_a_minute(seconds: float | None) -> int:
        run = world(sample_timeout_seconds=seconds)
        run.settle(59.0)
        failed = run.statistics()[0].failed
        run.close()
        return failed

    assert failed_after_a_minute(40.0) == 2
    assert failed_after_a_minute(100.0) == 0
    assert failed_after_a_minute(None) == 0
