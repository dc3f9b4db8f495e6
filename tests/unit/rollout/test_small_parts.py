"""Admission window, load balancer, groups, outbox."""

from __future__ import annotations

import asyncio

import pytest

from paceline.core.sample import Completion, Prompt, SamplingParams
from paceline.rollout.admission import AdmissionBudget
from paceline.rollout.groups import Groups
from paceline.rollout.load_balancer import LoadBalancer
from paceline.rollout.outbox import Outbox
from paceline.testing.virtual_clock import VirtualClock, run_virtual

PARAMS = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=4, stop_token_ids=())


def completion(request_id: str) -> Completion:
    return Completion(request_id, [1], [-0.5], [0], "stop")


def test_nothing_is_admitted_before_the_first_version() -> None:
    budget = AdmissionBudget(8)
    assert not budget.admit("1-1")
    budget.give_back("1-1")
    assert budget.free == 0
    budget.open_window([])
    assert [budget.admit(f"1-{i}") for i in range(9)] == [True] * 8 + [False]


def test_a_window_starts_with_what_is_outstanding() -> None:
    budget = AdmissionBudget(68)
    budget.open_window([f"1-{i}" for i in range(4 + 2 + 7)])  # active, waiting for resume, queued (case C17, run B)
    assert (budget.used, budget.free) == (13, 55)


def test_capacity_comes_back_on_a_failure() -> None:
    budget = AdmissionBudget(1)
    budget.open_window([])
    assert budget.admit("1-1")
    assert not budget.admit("1-2")
    budget.give_back("1-1")
    budget.give_back("1-1")
    assert budget.free == 1
    assert budget.admit("1-2")


def test_what_was_taken_before_the_window_opened_gives_nothing_back() -> None:
    budget = AdmissionBudget(2)
    budget.open_window([])
    assert budget.admit("1-1")
    budget.open_window(["1-2", "1-3"])  # the trainer holds 1-1, and drops it now
    budget.give_back("1-1")
    assert budget.free == 0


def test_what_an_earlier_life_consumed_of_the_window_is_not_admitted_again() -> None:
    budget = AdmissionBudget(8)
    budget.open_window(["1-1"], spent=4)
    assert (budget.used, budget.free) == (5, 3)
    budget.open_window(["1-1"])
    assert budget.free == 7


def test_more_outstanding_than_allowed_admits_nothing() -> None:
    budget = AdmissionBudget(4)
    budget.open_window([f"1-{i}" for i in range(6)])
    assert budget.free == 0
    assert not budget.admit("1-7")


def test_the_least_loaded_routable_replica_is_chosen() -> None:
    balancer = LoadBalancer()
    assert balancer.choose(4) is None
    balancer.open("a", 1)
    assert [balancer.choose(4), balancer.choose(4)] == ["a", "a"]
    balancer.open("b", 1)
    assert balancer.choose(4) == "b"
    balancer.done("a", 8)
    assert balancer.choose(4) == "a"
    assert balancer.outstanding("a") == 4
    balancer.close("a")
    balancer.done("a", 4)
    assert balancer.choose(1) == "b"
    assert balancer.outstanding("a") == 0


def test_among_equally_loaded_replicas_the_newest_version_is_chosen() -> None:
    balancer = LoadBalancer()
    balancer.open("laggard", 1)
    balancer.open("newest", 2)
    assert balancer.choose(4) == "newest"
    assert balancer.choose(4) == "laggard"  # the least loaded comes first
    balancer.open("laggard", 3)
    assert balancer.outstanding("laggard") == 4
    assert balancer.choose(4) == "laggard"


def test_groups_become_whole_once_in_any_order() -> None:
    groups = Groups(responses=2, params=PARAMS)
    prompt = Prompt("p", "?", (1, 2), "", "t")
    assert [request.request_id for request in groups.open("1-1", prompt)] == ["1-1/0~0", "1-1/1~0"]
    groups.open("1-2", prompt)
    taken = groups.take([completion("1-1/1~0"), completion("1-1/1~0"), completion("9-9/0~0")])
    assert (taken.whole, taken.zombies) == ([], 2)
    (whole,) = groups.take([completion("1-1/0~0"), completion("1-2/0~0")]).whole
    assert whole.sample_id == "1-1"
    assert [c.request_id for c in whole.completions if c] == ["1-1/0~0", "1-1/1~0"]
    assert groups.take([completion("1-1/0~0")]).zombies == 1
    assert len(groups) == 1


def test_what_a_lost_replica_delivers_late_is_refused() -> None:
    groups = Groups(responses=2, params=PARAMS)
    requests = groups.open("1-1", Prompt("p", "?", (1, 2), "", "t"))
    groups.take([completion("1-1/0~0")])
    again = groups.reissue(requests)
    assert [r.request_id for r in again["1-1"]] == ["1-1/1~1"]
    assert groups.losses("1-1") == 1
    assert groups.reissue(requests) == {}  # the loss was counted already
    assert groups.take([completion("1-1/1~0")]).zombies == 1
    (whole,) = groups.take([completion("1-1/1~1")]).whole
    assert whole.missing == 0


def test_the_outbox_keeps_what_is_not_acknowledged() -> None:
    async def main(clock: VirtualClock) -> None:
        outbox = Outbox(clock=clock)
        assert await outbox.collect(0.5) == (0, [])
        assert clock.now() == pytest.approx(0.5)
        outbox.put([completion("a"), completion("b")])
        number, first = await outbox.collect(0.5)
        assert [c.request_id for c in first] == ["a", "b"]
        outbox.put([completion("c")])
        assert [c.request_id for c in (await outbox.collect(0.5))[1]] == ["a", "b", "c"]
        assert [c.request_id for c in outbox.acknowledge(number)] == ["a", "b"]
        assert [c.request_id for c in (await outbox.collect(0.0))[1]] == ["c"]

    run_virtual(main)


def test_the_outbox_wakes_a_waiting_collector_and_lingers_for_company() -> None:
    async def main(clock: VirtualClock) -> None:
        outbox = Outbox(clock=clock)
        collecting = asyncio.ensure_future(outbox.collect(100.0))
        await clock.sleep(1.0)
        outbox.put([completion("a")])
        await clock.sleep(0.001)
        outbox.put([completion("b")])
        assert [c.request_id for c in (await collecting)[1]] == ["a", "b"]
        assert clock.now() < 1.1

    run_virtual(main)
