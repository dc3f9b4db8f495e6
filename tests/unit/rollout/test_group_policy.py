"""Responses that cannot be made: the group ends, or goes on with its survivors; what nobody wants is aborted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest

from paceline.algo.advantage import AdvantageEstimator, group_advantages
from paceline.core.checkpoint import RollouterSnapshot
from paceline.core.events import ResponsesAborted
from paceline.core.sample import Completion, FinishReason, GenerationRequest, Prompt, SamplingParams
from paceline.core.version import Lineage, Version
from paceline.core.waits import Waits
from paceline.rollout.fleet import Fleet
from paceline.rollout.groups import Group, Groups
from paceline.rollout.orphans import Orphans
from paceline.rollout.resumption import Resumption
from paceline.testing.recording import RecordingEvents
from paceline.testing.virtual_clock import VirtualClock, run_virtual
from tests.simulation.hand_replica import HandReplica
from tests.unit.rollout.test_replica import Rig, request, with_rig

PROMPT = Prompt("p", "?", (1, 2), "", "t")
PARAMS = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=4, stop_token_ids=())


def made(request_id: str, reason: FinishReason = "stop", tokens: Sequence[int] = (1, 2)) -> Completion:
    count = len(tokens)
    return Completion(
        request_id,
        list(tokens),
        [-0.5] * count,
        [Version(1, 0).packed] * count,
        reason,
        "bad" if reason == "error" else "",
    )


def survivors(n: int = 3) -> Groups:
    groups = Groups(responses=n, params=PARAMS, policy="survivors")
    groups.open("1-1", PROMPT)
    return groups


def test_a_refused_response_ends_its_group_when_it_would_be_tried_again() -> None:
    groups = Groups(responses=3, params=PARAMS, policy="retry")
    groups.open("1-1", PROMPT)
    taken = groups.take([made("1-1/0~0"), made("1-1/1~0", "error")])
    assert taken.refused == {"1-1": "bad"}
    assert not groups.is_open("1-1")


def test_survivors_go_on_once_the_others_are_there() -> None:
    groups = survivors()
    assert groups.take([made("1-1/1~0", "error")]).refused == {}
    assert groups.take([made("1-1/0~0")]).reduced == []
    assert not groups.awaits("1-1/1~0")
    ((group, reason),) = groups.take([made("1-1/2~0")]).reduced
    assert [completion and completion.request_id for completion in group.completions] == ["1-1/0~0", None, "1-1/2~0"]
    assert reason == "refused by its engine"
    assert not groups.is_open("1-1")


def test_one_survivor_is_not_enough() -> None:
    groups = survivors()
    groups.take([made("1-1/1~0", "error"), made("1-1/0~0")])
    taken = groups.take([made("1-1/2~0", "error")])
    assert (taken.reduced, taken.refused) == ([], {"1-1": "bad"})


@pytest.mark.parametrize(
    ("policy", "finished", "goes_on"), [("survivors", 2, True), ("survivors", 1, False), ("retry", 2, False)]
)
def test_a_sample_that_is_given_up(policy: Literal["retry", "survivors"], finished: int, goes_on: bool) -> None:
    groups = Groups(responses=3, params=PARAMS, policy=policy)
    groups.open("1-1", PROMPT)
    groups.take([made(f"1-1/{index}~0", tokens=range(index + 1)) for index in range(finished)])
    given_up = groups.give_up("1-1")
    assert given_up is not None
    assert (given_up.survivors is not None) == goes_on
    assert given_up.lengths == {index + 1: 1 for index in range(finished)}
    assert given_up.unwanted == [f"1-1/{index}~0" for index in range(finished, 3)]
    assert groups.give_up("1-1") is None
    assert groups.take([made("1-1/2~0")]).zombies == 1


def test_a_group_that_has_given_responses_up_resumes_without_them() -> None:
    groups = survivors()
    groups.take([made("1-1/1~0", "error"), made("1-1/0~0")])
    (group,) = groups.all_open()
    snapshot = RollouterSnapshot(
        life=1, admitted=1, failed=0, dropped=0, prompts=b"", groups=[group.as_open()], ready=[], admitted_under={}
    )
    (restored,) = Resumption(snapshot, Lineage(2, 0, {1: 9}), ()).groups()
    fresh = Groups(responses=3, params=PARAMS, policy="survivors")
    assert [one.request_id for one in fresh.restore(restored)] == ["1-1/2~0"]
    assert len(fresh.take([made("1-1/2~0")]).reduced) == 1


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_advantages_of_survivors_are_those_of_a_group_of_their_size(estimator: AdvantageEstimator) -> None:
    # 1 and 0 of what would have been 1, 0, 1: mean 1/2, unbiased standard deviation sqrt(1/2), the other's reward.
    expected = {"grpo": 0.5 / (0.5**0.5 + 1e-6), "dr_grpo": 0.5, "rloo": 1.0}[estimator]
    assert group_advantages([1.0, 0.0], estimator) == pytest.approx([expected, -expected])


def test_an_aborted_request_is_taken_out_of_the_engine_and_never_comes_back() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.sync(0)
        await rig.send(request("kept", tokens=12), request("unwanted", tokens=500))
        await rig.clock.sleep(0.05)
        (engine,) = rig.engines
        assert engine.running == 2
        await rig.abort("unwanted", "unknown")
        assert engine.running == 1
        await rig.finish("kept")
        assert rig.completions.keys() == {"kept"}
        assert [event.requests for event in rig.events.of(ResponsesAborted)] == [["unwanted"]]

    with_rig(scenario)


class FleetRig:
    """Two replicas moved by hand, and what comes back from them."""

    def __init__(self, clock: VirtualClock) -> None:
        self.replicas = [HandReplica("replica-0"), HandReplica("replica-1")]
        self.clock = clock
        self.came: list[str] = []
        events = RecordingEvents()
        self.fleet = Fleet(
            self.replicas,
            on_completions=lambda name, completions: self.came.extend(one.request_id for one in completions),
            on_orphans=lambda requests: None,
            waits=Waits(who="rollouter", clock=clock, events=events),
            events=events,
            reply_seconds=10.0,
            return_seconds=10.0,
        )
        self.fleet.confirm({"replica-0": 1, "replica-1": 1})


def generation(request_id: str) -> GenerationRequest:
    return GenerationRequest(request_id=request_id, prompt_ids=[1, 2], params=PARAMS)


def test_a_fleet_aborts_at_whoever_has_it_and_its_load_falls() -> None:
    async def main(clock: VirtualClock) -> None:
        rig = FleetRig(clock)
        rig.fleet.send([generation("1-1/0~0"), generation("1-1/1~0")])
        await clock.sleep(0.2)
        assert list(rig.replicas[0].held) == ["1-1/0~0", "1-1/1~0"]
        rig.fleet.send([generation("1-2/0~0")])
        rig.fleet.abort(["1-1/0~0", "1-1/1~0", "1-2/0~0"])  # 1-2 has not even been sent
        await clock.sleep(0.2)
        assert rig.replicas[0].aborted == ["1-1/0~0", "1-1/1~0"]
        assert rig.replicas[1].held == {}
        assert rig.fleet.send([generation("1-3/0~0")]) == "replica-0"  # nobody is loaded
        await clock.sleep(0.2)
        rig.replicas[0].finish("1-3/0~0")
        await clock.sleep(0.2)
        assert rig.came == ["1-3/0~0"]

    run_virtual(main)


def test_samples_on_their_last_chance_go_one_at_a_time() -> None:
    async def main(clock: VirtualClock) -> None:
        rig = FleetRig(clock)
        groups = Groups(responses=1, params=PARAMS)
        orphans = Orphans(groups, rig.fleet, last_chance=2)
        for number, losses in ((1, 2), (2, 1), (3, 2), (4, 2)):
            group = Group(f"1-{number}", PROMPT, [None], [losses], [None], losses)
            orphans.add(groups.restore(group))
        for last in ("1-1/0~2", "1-3/0~2", "1-4/0~2"):
            orphans.send()
            await clock.sleep(0.2)
            held = {one for replica in rig.replicas for one in replica.held}
            assert held == {"1-2/0~1", last}
            for replica in rig.replicas:
                replica.held.pop(last, None)
            groups.take([made(last)])

    run_virtual(main)
