"""Cases C13, C14 and C15: caches over an update, token budgets over interruptions, one sample over three versions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import pytest
import torch

from paceline.core.commands import ExchangeReply, ExchangeRequest
from paceline.core.config import Config, build_config
from paceline.core.errors import ConfigError, SyncError
from paceline.core.events import PromptRefused, ResponsesAborted, SampleFailed
from paceline.core.sample import Completion, Prompt, Response, Sample, SamplingParams, decode_sample
from paceline.core.version import Lineage, Version
from paceline.message_queue import MessageQueue
from paceline.rollout.groups import Groups
from paceline.rollout.rollouter import FullyAsyncRollouter
from paceline.testing.marker_model import MarkerEngine, marker_logprob, marker_of
from paceline.testing.marker_task import EndlessPrompts, LengthReward, NumberDecoder
from paceline.testing.recording import CallLog, RecordingEvents, RecordingReplica
from paceline.testing.virtual_clock import VirtualClock, run_virtual
from paceline.train.staleness import loss_mask, token_lags
from tests.simulation.replica_rig import ReplicaRig, request, with_replicas

P = [1, 2, 3, 4, 5, 6, 7, 8]
P_AND_4 = [*P, 9, 10, 11, 12]

# -- C13: prefix and KV cache after an update ------------------------------------------------------------------------


class ClearFails(MarkerEngine):
    """Its cache cannot be cleared at the first update; the old weights are bound again."""

    failures = 1

    def bind(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        if self.version is not None and self.failures:
            self.failures -= 1
            raise SyncError("the prefix cache was not cleared")
        super().bind(tensors, version)


class ClearIsUnsupported(MarkerEngine):
    """Its cache can never be cleared."""

    def bind(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        if self.version is not None:
            raise SyncError("clearing the prefix cache is not supported")
        super().bind(tensors, version)


def test_c13_no_prompt_meets_cache_blocks_of_old_weights() -> None:
    async def scenario(*rigs: ReplicaRig) -> None:
        for rig in rigs:
            await rig.sync(1)
            await rig.exchange(request("before", P))
            await rig.finish("before")
            await rig.exchange(request("over", P, tokens=50))
            await rig.until_tokens(12 + 5)
            await rig.sync(2)
            await rig.exchange(request("P", P), request("P+4", P_AND_4))
            over, _, _ = await rig.finish("over", "P", "P+4")
            used = rig.engines[0].prefill_markers
            assert used == {"before": {1}, "over": {1}, "P": {2}, "P+4": {2}}
            assert {Version.unpack(version).n for version in over.versions} == {1, 2}  # recorded as spanning both
            assert {marker_of(token) for token in over.token_ids} == {1, 2}

    with_replicas(scenario, ReplicaRig, ReplicaRig)


def test_c13_a_clear_that_fails_is_no_success_and_the_old_version_is_served() -> None:
    async def scenario(good: ReplicaRig, bad: ReplicaRig) -> None:
        for rig in (good, bad):
            await rig.sync(1)
        assert (await good.sync(2)).version == Version(1, 2).packed
        with pytest.raises(SyncError, match="not cleared"):
            await bad.sync(2)
        assert (await bad.replica.report()).version == Version(1, 1).packed
        await bad.exchange(request("P", P))
        (done,) = await bad.finish("P")
        assert {marker_of(token) for token in done.token_ids} == {1}

    with_replicas(scenario, ReplicaRig, lambda clock: ReplicaRig(clock, make_engine=ClearFails))


def test_c13_an_engine_that_cannot_prove_its_cache_clear_serves_nothing() -> None:
    async def scenario(good: ReplicaRig, bad: ReplicaRig) -> None:
        for rig in (good, bad):
            await rig.sync(1)
        await bad.exchange(request("P", P, tokens=200))
        await good.sync(2)
        with pytest.raises(SyncError, match="not supported"):
            await bad.sync(2)
        assert (await bad.replica.report()).state == "fenced"
        frozen = bad.engines[0].tokens_generated
        await bad.clock.sleep(10)
        assert bad.engines[0].tokens_generated == frozen
        assert (await good.replica.report()).state == "ready"

    with_replicas(scenario, ReplicaRig, lambda clock: ReplicaRig(clock, make_engine=ClearIsUnsupported))


# -- C14: budgets, and prompts that are too long ---------------------------------------------------------------------


def budgets(prompt_tokens: int, aborts: list[int]) -> tuple[list[int], Completion]:
    """Requested budgets when a response is aborted after so many more tokens each, and what came of it."""
    params = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=10, stop_token_ids=())
    groups = Groups(responses=1, params=params, longest=16, on_abort="continue")
    engine = MarkerEngine()
    tensors = {"marker": torch.ones(1, dtype=torch.int64), "weight": torch.ones(8), "head": torch.ones(8)}
    engine.bind(tensors, Version(1, 1).packed)
    sent = groups.open("1-1", Prompt("p", "?", tuple(range(prompt_tokens)), "", "t"))
    asked: list[int] = []
    while sent:
        (one,) = sent
        asked.append(one.params.max_tokens - len(one.response_ids))
        engine.add([one])
        steps = aborts.pop(0) if aborts else 100
        finished = [completion for _ in range(steps) if engine.running + engine.waiting for completion in engine.step()]
        taken = groups.take(finished or engine.abort([one.request_id]))
        sent = taken.again
        if taken.whole:
            (whole,) = taken.whole[0].completions
            assert whole is not None
            return asked, whole
    raise AssertionError("the response never ended")


@pytest.mark.parametrize(
    ("prompt_tokens", "aborts", "asked", "total"),
    [(4, [6, 3], [10, 4, 1], 10), (8, [6, 1], [8, 2, 1], 8)],
    ids=["a", "b"],
)
def test_c14_the_remaining_budget_is_carried(
    prompt_tokens: int, aborts: list[int], asked: list[int], total: int
) -> None:
    requested, response = budgets(prompt_tokens, aborts)
    assert requested == asked
    assert response.token_ids == [1000 + position for position in range(total)]
    assert len(response.logprobs) == len(response.versions) == total
    assert response.finish_reason == "length"


def test_c14_aborted_at_the_last_token_nothing_is_sent() -> None:
    params = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=10, stop_token_ids=())
    groups = Groups(responses=1, params=params, longest=16, on_abort="continue")
    groups.open("1-1", Prompt("p", "?", (1, 2, 3, 4), "", "t"))
    tokens = list(range(1000, 1010))
    taken = groups.take([Completion("1-1/0~0", tokens, [-1.0] * 10, [1] * 10, "abort")])
    assert taken.again == []
    (done,) = taken.whole[0].completions
    assert done is not None
    assert (done.finish_reason, done.token_ids) == ("length", tokens)


class Refusing(RecordingReplica):
    """Answers each request at once; those of the third prompt it refuses, like a server that says 400."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(CallLog(), "replica-0")
        self.clock = clock
        self.sent: list[tuple[str, int]] = []

    async def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        await self.clock.sleep(0.01)
        done = []
        for one in request.requests:
            self.sent.append((one.request_id, len(one.prompt_ids)))
            bad = one.prompt_ids[0] == 3
            done.append(
                Completion(one.request_id, [], [], [], "error", "400")
                if bad
                else Completion(one.request_id, [7], [-0.1], [0], "stop")
            )
        return ExchangeReply(batch=len(self.sent), completions=done, running=0, waiting=0)


class LongPrompts(EndlessPrompts):
    """Prompt k begins with token k; the second has 9 tokens, the fourth 16."""

    def next_prompt(self) -> Prompt:
        prompt = super().next_prompt()
        number = int(prompt.prompt_id[1:])
        tokens = (number,) * {2: 9, 4: 16}.get(number, 4)
        return Prompt(prompt.prompt_id, "?", tokens, "", "t")


def long_prompts_config(longest: int = 8) -> Config:
    return build_config(
        {
            "actor": {"ppo_mini_batch_size": 4},
            "async_training": {"staleness_threshold": 0.0, "trigger_parameter_sync_step": 1},
            "rollout": {"n": 2, "total_rollout_steps": 8, "max_model_len": 16},
            "data": {"max_prompt_length": longest, "max_response_length": 10},
        }
    )


def with_refusals(
    scenario: Callable[[FullyAsyncRollouter, Refusing, MessageQueue, RecordingEvents], Awaitable[None]],
) -> None:
    async def main(clock: VirtualClock) -> None:
        events = RecordingEvents()
        queue = MessageQueue(
            capacity=100, producers=["rollouter"], put_timeout_seconds=60, clock=clock, events=RecordingEvents()
        )
        replica = Refusing(clock)
        rollouter = FullyAsyncRollouter(
            long_prompts_config(),
            life=1,
            prompts=LongPrompts(),
            replicas=[replica],
            queue=queue,
            reward=LengthReward(),
            decoder=NumberDecoder(),
            stop_token_ids=(),
            clock=clock,
            events=events,
        )
        fitting = asyncio.ensure_future(rollouter.fit())
        async with asyncio.timeout(10):
            await scenario(rollouter, replica, queue, events)
        fitting.cancel()
        await asyncio.gather(fitting, return_exceptions=True)

    run_virtual(main)


def test_c14_a_prompt_that_is_too_long_is_never_sent_and_the_batch_fills_from_others() -> None:
    async def scenario(
        rollouter: FullyAsyncRollouter, replica: Refusing, queue: MessageQueue, events: RecordingEvents
    ) -> None:
        await rollouter.confirm_replicas({"replica-0": 0}, {})
        await rollouter.update_param_version(0, False, 0, False)
        taken: list[str] = []
        while len(taken) < 4:
            items, _ = await queue.get_samples(4 - len(taken), 1.0)
            taken += [decode_sample(item).prompt.prompt_id for item in items]
        assert taken == ["p1", "p5", "p6", "p7"]
        assert [(e.prompt_id, e.tokens, e.allowed) for e in events.of(PromptRefused)] == [("p2", 9, 8), ("p4", 16, 8)]
        assert {tokens for _, tokens in replica.sent} == {4}

    with_refusals(scenario)


def test_c14_what_an_engine_always_refuses_fails_alone_after_one_try() -> None:
    async def scenario(
        rollouter: FullyAsyncRollouter, replica: Refusing, queue: MessageQueue, events: RecordingEvents
    ) -> None:
        await rollouter.confirm_replicas({"replica-0": 0}, {})
        await rollouter.update_param_version(0, False, 0, False)
        await asyncio.sleep(1.0)
        assert [(event.ids, event.error) for event in events.of(SampleFailed)] == [(["1-2"], "400")]
        assert [name for name, _ in replica.sent if name.startswith("1-2/")] == ["1-2/0~0", "1-2/1~0"]
        assert await queue.get_queue_size() == 4

    with_refusals(scenario)


def test_c14_a_context_without_room_for_a_response_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="leaves no room for a response"):
        long_prompts_config(longest=16)


# -- C15: one sample over three versions -----------------------------------------------------------------------------


async def over_three_versions(rig: ReplicaRig) -> Completion:
    """A sample under way while versions 4 and 6 come, after 2 and 4 tokens."""
    await rig.sync(2)
    await rig.exchange(request("a", P, tokens=12))
    await rig.until_tokens(2)
    await rig.sync(4)
    await rig.until_tokens(4)
    await rig.sync(6)
    while "a" not in rig.completions:
        await rig.exchange(wait_seconds=1.0)
    return rig.completions["a"]


def numbers(done: Completion) -> list[int]:
    return [Version.unpack(version).n for version in done.versions]


def test_c15_partial_each_token_carries_its_version() -> None:
    async def scenario(rig: ReplicaRig) -> None:
        done = await over_three_versions(rig)
        assert done.token_ids == [2000, 2001, 4002, 4003, *range(6004, 6012)]
        assert numbers(done) == [2, 2, 4, 4, *[6] * 8]
        assert done.logprobs == [marker_logprob(n, position) for position, n in enumerate(numbers(done))]
        response = Response(done.token_ids, done.logprobs, done.versions, "length", "", 0.0)
        trainer, lineage = Version(1, 6), Lineage(life=1)
        assert loss_mask(response, trainer, lineage, None) == [1] * 12
        assert loss_mask(response, trainer, lineage, 0) == [0, 0, 0, 0, *[1] * 8]
        sample = Sample("1-1", 1, Prompt("p", "?", (1,), "", "t"), [response])
        assert max(token_lags([sample], trainer, lineage)) == 4  # from the oldest token

    with_replicas(scenario, ReplicaRig)


def test_c15_not_partial_a_sequence_ends_under_the_version_it_began_with() -> None:
    async def scenario(rig: ReplicaRig) -> None:
        done = await over_three_versions(rig)
        assert done.token_ids == [2000 + position for position in range(12)]
        assert numbers(done) == [2] * 12

    with_replicas(scenario, lambda clock: ReplicaRig(clock, partial_rollout=False))


def test_c15_not_partial_and_no_time_to_drain_it_is_begun_again_under_the_new_one() -> None:
    params = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=12, stop_token_ids=())

    async def scenario(rig: ReplicaRig) -> None:
        groups = Groups(responses=1, params=params, on_abort="restart")
        await rig.sync(2)
        await rig.exchange(*groups.open("1-1", Prompt("p", "?", tuple(P), "", "t")))
        await rig.until_tokens(3)
        await rig.sync(6)
        (aborted,) = await rig.finish("1-1/0~0")
        assert aborted.finish_reason == "abort"
        assert {marker_of(token) for token in aborted.token_ids} == {2}
        (event,) = rig.events.of(ResponsesAborted)
        assert event.requests == ["1-1/0~0"]
        await rig.exchange(*groups.take([aborted]).again)
        (done,) = await rig.finish("1-1/0~1")
        assert done.token_ids == [6000 + position for position in range(12)]
        assert numbers(done) == [6] * 12
        assert list(rig.sender.blocking_holders()) == []

    with_replicas(scenario, lambda clock: ReplicaRig(clock, partial_rollout=False, drain_seconds=0.02))
