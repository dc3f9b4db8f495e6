"""Responses without a score: their group ends, or its survivors are trained (`rollout.group_policy`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import Literal, NamedTuple

import pytest

from paceline.core.errors import RewardError
from paceline.core.sample import Completion, Prompt, Sample
from paceline.core.sections.reward import RewardConfig
from paceline.rollout.bounded_reward import BoundedReward
from paceline.rollout.groups import Group
from paceline.rollout.scorer import MOST_FAILED_IN_A_ROW, Scorer
from paceline.testing.virtual_clock import VirtualClock, run_virtual

DEADLINE = 10.0
BOOM = "reward: ValueError: boom"
LATE = "reward: no answer within 10 s"


class Words:
    """A token is a word; the reward does what it says."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return {0: "good", 1: "raise", 2: "hang"}[token_ids[0]]

    async def score(self, prompt: Prompt, response_text: str) -> float:
        if response_text == "raise":
            raise ValueError("boom")
        if response_text == "hang":
            await asyncio.Event().wait()
        return 1.0


class Ended(NamedTuple):
    """Responses of the sample, None if it failed; what was said of it; seconds."""

    responses: int | None
    said: list[tuple[int, str]]
    seconds: float


def group_of(words: str) -> Group:
    """With these responses: g(ood), r(aise), h(ang)."""
    made: list[Completion | None] = [Completion("r", ["grh".index(word)], [0.0], [0], "stop") for word in words]
    return Group("1-1", Prompt("p", "?", (1,), "", "t"), made, [0] * len(made), [None] * len(made))


def scored(words: str, policy: Literal["retry", "survivors"]) -> Ended:
    """What became of a group with these responses."""
    ends: list[Ended] = []

    async def main(clock: VirtualClock) -> None:
        ended = asyncio.Event()
        samples: list[Sample | None] = []
        said: list[tuple[int, str]] = []

        def end(sample: Sample | None) -> None:
            samples.append(sample)
            ended.set()

        def fail(_: str, error: str) -> None:
            said.append((0, error))
            end(None)

        scorer = Scorer(
            life=1,
            reward=BoundedReward(RewardConfig(timeout_seconds=DEADLINE), Words()),
            decoder=Words(),
            policy=policy,
            on_sample=end,
            on_reduced=lambda _, lacking, reason: said.append((lacking, reason)),
            on_failure=fail,
        )
        scorer.submit(group_of(words))
        running = asyncio.ensure_future(scorer.run())
        await ended.wait()
        running.cancel()
        assert scorer.unfinished == []
        (sample,) = samples
        ends.append(Ended(None if sample is None else len(sample.responses), said, clock.now()))

    run_virtual(main)
    return ends[0]


@pytest.mark.parametrize(
    ("words", "ended"),
    [
        ("gggg", Ended(4, [], 0)),
        ("ggrg", Ended(3, [(1, BOOM)], 0)),
        ("rggg", Ended(3, [(1, BOOM)], 0)),
        ("rrgg", Ended(2, [(2, BOOM)], 0)),
        ("rrrg", Ended(None, [(0, BOOM)], 0)),
        ("grrr", Ended(None, [(0, BOOM)], 0)),
        ("hggg", Ended(3, [(1, LATE)], DEADLINE)),
        ("ghhg", Ended(2, [(2, LATE)], DEADLINE)),
        ("rhgg", Ended(2, [(2, BOOM)], DEADLINE)),
        # A row that hangs whatever its response is costs two deadlines, not one for each of them.
        ("hhhhhhhh", Ended(None, [(0, LATE)], 2 * DEADLINE)),
    ],
)
def test_survivors_go_on_without_the_responses_that_have_no_score(words: str, ended: Ended) -> None:
    assert scored(words, "survivors") == ended


@pytest.mark.parametrize(
    ("words", "ended"),
    [
        ("gggg", Ended(4, [], 0)),
        ("ggrg", Ended(None, [(0, BOOM)], 0)),
        ("hhhhhhhh", Ended(None, [(0, LATE)], DEADLINE)),
    ],
)
def test_otherwise_one_without_a_score_ends_its_group(words: str, ended: Ended) -> None:
    assert scored(words, "retry") == ended


def test_a_reward_that_never_works_ends_the_run() -> None:
    async def main(clock: VirtualClock) -> None:
        failed: list[str] = []
        scorer = Scorer(
            life=1,
            reward=BoundedReward(RewardConfig(), Words()),
            decoder=Words(),
            policy="retry",
            on_sample=lambda _: None,
            on_reduced=lambda *_: None,
            on_failure=lambda _, error: failed.append(error),
        )

        async def submit() -> None:
            for number in count(1):
                scorer.submit(group_of("gg" if number == MOST_FAILED_IN_A_ROW // 2 else "rr"))
                await clock.sleep(1)

        submitting = asyncio.ensure_future(submit())
        with pytest.raises(RewardError, match=f"1000 samples in a row have no reward, the last one: {BOOM}"):
            await scorer.run()
        submitting.cancel()
        assert len(failed) == MOST_FAILED_IN_A_ROW + MOST_FAILED_IN_A_ROW // 2 - 1

    run_virtual(main)
