"""A hostile reward under the scorer of a run, and what `check-reward` says of it before.

Of a hundred rows one hangs, one gives None, one raises, one prints and one forks; the function notes each call.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from paceline.cli.check_reward_command import check_reward
from paceline.core.sample import Completion, Prompt, Sample
from paceline.core.sections.reward import RewardConfig
from paceline.reward.process_reward import ProcessReward, open_reward
from paceline.rollout.bounded_reward import BoundedReward
from paceline.rollout.groups import Group
from paceline.rollout.scorer import Scorer
from tests.unit.dataset.files import sum_row, write_jsonl
from tests.unit.reward.functions import spec_of, write

ROWS, RESPONSES, WORKERS = 300, 4, 3
HANG, NONE, RAISE, PRINT, FORK = range(1, 6)
HOSTILE = """
import os, pathlib
def compute_score(data_source, solution_str, ground_truth, extra_info, notes):
    kind = extra_info["index"] % 100
    with open(notes, "a") as file:
        file.write(f"{extra_info['index']}\\n")
    if kind == 1:
        while True:
            pass
    if kind == 2:
        return None
    if kind == 3:
        raise ValueError("boom")
    if kind == 4:
        print("noise")
    if kind == 5:
        os.fork()
    return float(solution_str == ground_truth)
"""
REASONS = {"reward: no answer within 5 s": 3, "reward: returned None, not a number": 3, "reward: ValueError: boom": 3}


class Digits:
    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(str, token_ids))


def group(index: int) -> Group:
    prompt = Prompt(str(index), "?", (1,), str(index), "sums", {"index": index})
    made: list[Completion | None] = [Completion("r", [index], [0.0], [0], "stop") for _ in range(RESPONSES)]
    return Group(str(index), prompt, made, [0] * RESPONSES, [None] * RESPONSES)


def score_all(path: Path, notes: Path, log: Path) -> tuple[list[Sample], dict[str, str], ProcessReward]:
    """Samples, failures by sample id, and the reward when it is done."""
    samples: list[Sample] = []
    failures: dict[str, str] = {}

    async def main() -> ProcessReward:
        done = asyncio.Event()

        def end_of(take: Callable[..., None], *outcome: object) -> None:
            take(*outcome)
            if len(samples) + len(failures) == ROWS:
                done.set()

        reward = await open_reward(spec_of(path, notes=str(notes)), log, WORKERS, 5.0)
        scorer = Scorer(
            life=1,
            reward=BoundedReward(RewardConfig(timeout_seconds=5.0, num_workers=WORKERS), reward),
            decoder=Digits(),
            policy="retry",
            on_sample=partial(end_of, samples.append),
            on_reduced=lambda *_: None,
            on_failure=partial(end_of, failures.__setitem__),
        )
        for index in range(ROWS):
            scorer.submit(group(index))
        running = asyncio.ensure_future(scorer.run())
        async with asyncio.timeout(120):
            await done.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await reward.close()
        return reward

    reward = asyncio.run(main())
    return samples, failures, reward


def test_bad_rows_cost_themselves_and_are_counted_by_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    notes = tmp_path / "notes"
    samples, failures, reward = score_all(write(tmp_path, HOSTILE), notes, tmp_path / "log")
    bad = {str(index) for index in range(ROWS) if index % 100 in (HANG, NONE, RAISE)}
    assert failures.keys() == bad
    assert Counter(failures.values()) == REASONS
    assert {sample.sample_id for sample in samples} == {str(index) for index in range(ROWS)} - bad
    assert all([r.reward for r in sample.responses] == [1.0] * RESPONSES for sample in samples)
    # The cost: a bad row is asked once, however many responses it has, and a process is started for each that hung.
    calls = Counter(notes.read_text(encoding="utf-8").split())
    assert all(calls[str(index)] == (1 if str(index) in bad else RESPONSES) for index in range(ROWS))
    assert reward.started <= WORKERS + sum(index % 100 == HANG for index in range(ROWS))
    assert capfd.readouterr() == ("", "")
    printed = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    assert printed == ["noise"] * 3 * RESPONSES, printed


def test_check_reward_has_told_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", [sum_row(index) for index in range(100)])
    path = write(tmp_path, HOSTILE)
    arguments = {"rows": 100, "name": "compute_score", "timeout": 5.0, "prompt_key": "prompt"}
    kwargs = f'{{"notes": "{tmp_path / "notes"}"}}'
    assert check_reward(str(path), [str(data)], kwargs=kwargs, **arguments) == 1  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{path}: def compute_score, 100 of 100 rows"
    assert lines[1] == "ground truths score   mean 1.000, from 1 to 1"
    assert lines[2] == "empty responses score mean 0.000, from 0 to 0"
    assert lines[-6].startswith("it prints: ")
    assert lines[-5].startswith("it leaves processes behind: ")
    assert lines[-4:] == [
        "3 of 100 rows have no score",
        f"  {data}:2: no answer within 5 s",
        f"  {data}:3: returned None, not a number",
        f"  {data}:4: ValueError: boom",
    ]


def test_check_reward_finds_ground_truths_that_score_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", [sum_row(index, extra_info=None) for index in range(9)])
    text = "async def compute_score(solution_str, **row):\n    return '<a>' in solution_str"
    arguments = {"rows": 4, "name": "compute_score", "timeout": 5.0, "prompt_key": "prompt", "kwargs": "{}"}
    assert check_reward(str(write(tmp_path, text)), [str(data)], **arguments) == 0  # type: ignore[arg-type]
    out = capsys.readouterr().out
    assert "async def compute_score, 4 of 9 rows" in out
    assert "look: ground truths score no better than empty responses" in out
    assert "0 of 4 rows have no score" in out


@pytest.mark.parametrize(("name", "data"), [("math_verify", None), ("reasoning_gym", "reasoning_gym:chain_sum")])
def test_check_reward_takes_a_built_in_scorer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, data: str | None
) -> None:
    file = data or str(write_jsonl(tmp_path / "rows.jsonl", [sum_row(index) for index in range(9)]))
    arguments = {"rows": 3, "name": "compute_score", "timeout": 20.0, "prompt_key": "prompt", "kwargs": "{}"}
    assert check_reward(name, [file], **arguments) == 0  # type: ignore[arg-type]
    out = capsys.readouterr().out
    assert "ground truths score   mean 1.000" in out
    assert "0 of 3 rows have no score" in out
