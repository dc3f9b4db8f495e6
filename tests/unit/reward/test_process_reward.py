"""Reward functions in processes: whatever one does costs the call in which it does it."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError, RewardError, RewardTimeout
from paceline.core.sample import Score
from paceline.core.sections.reward import RewardConfig
from paceline.reward.process_reward import MOST_CHILDREN, ProcessReward, open_reward
from paceline.rollout.bounded_reward import BoundedReward
from tests.leaping_clock import LeapingClock
from tests.unit.reward.functions import ASYNC, HOSTILE, prompt, spec_of, with_reward, write

RIGHT = Score(1.0, {"length": 2.0})


async def outcome(reward: ProcessReward, response: str, deadline: float = 30.0) -> str:
    """What became of a call, as a word or a line."""
    try:
        async with asyncio.timeout(deadline):
            return str((await reward.score(prompt(), response)).value)
    except TimeoutError:
        return "deadline"
    except RewardError as error:
        return error.message


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while lives(pid):
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.01)


def test_a_def_function_scores_with_metrics(tmp_path: Path) -> None:
    async def scenario(reward: ProcessReward) -> None:
        assert not reward.is_async
        assert await reward.score(prompt(), "42") == RIGHT
        assert await reward.score(prompt(), "4") == Score(0.0, {"length": 1.0})
        assert await reward.score(prompt({"a": [1, None]}), "4") == Score(0.0, {"length": 1.0})

    with_reward(spec_of(write(tmp_path, HOSTILE)), tmp_path / "log", scenario)


def test_what_a_function_does_costs_its_own_call(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario(reward: ProcessReward) -> None:
        expected = {
            "none": "reward: returned None, not a number",
            "raise": "reward: ValueError: boom and more",
            "print": "0.0",
            "fork": "0.0",
            "exit": "reward: its process ended with 3",
            "sysexit": "reward: SystemExit: bye",
        }
        for response, result in expected.items():
            assert await outcome(reward, response) == result
            assert await reward.score(prompt(), "42") == RIGHT

    with_reward(spec_of(write(tmp_path, HOSTILE)), tmp_path / "log", scenario)
    assert capfd.readouterr() == ("", "")
    assert sorted((tmp_path / "log").read_text(encoding="utf-8").split("\n")) == ["", "more noise", "noise"]


def test_lines_that_several_processes_print_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    text = (
        "import sys\ndef compute_score(solution_str, **row):\n"
        "    for number in range(20000): print('noise', file=(sys.stdout, sys.stderr)[number % 2])\n    return 1"
    )

    async def scenario(reward: ProcessReward) -> None:
        assert await asyncio.gather(*(outcome(reward, "42") for _ in range(20))) == ["1.0"] * 20

    with_reward(spec_of(write(tmp_path, text)), tmp_path / "log", scenario)
    lines = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    assert (set(lines), len(lines)) == ({"noise"}, 20000 * 20)


def test_a_hanging_call_ends_at_its_deadline_and_others_go_on(tmp_path: Path) -> None:
    async def scenario(reward: ProcessReward) -> None:
        hanging = asyncio.ensure_future(outcome(reward, "hang", deadline=0.5))
        assert [await outcome(reward, "42") for _ in range(20)] == ["1.0"] * 20
        assert await hanging == "deadline"
        assert await outcome(reward, "42") == "1.0"
        # Two processes at first, and one in the place of the one that hung.
        assert reward.started <= 3

    with_reward(spec_of(write(tmp_path, HOSTILE)), tmp_path / "log", scenario)


def test_a_late_call_has_a_successor_before_it_is_ended(tmp_path: Path) -> None:
    hang = "    while solution_str == 'hang': pass\n"
    text = f"import os\ndef compute_score(solution_str, **row):\n{hang}    return os.getpid()"
    clock = LeapingClock()

    async def scenario(reward: ProcessReward) -> None:
        first = await outcome(reward, "?")
        hanging = asyncio.ensure_future(outcome(reward, "hang", deadline=120.0))
        await asyncio.sleep(0)
        clock.leap(0.26 * 120.0)
        second = await outcome(reward, "?")  # its one place is taken: only a successor can answer
        assert not hanging.done()
        assert first != second
        hanging.cancel()
        assert await outcome(reward, "?") == second
        assert reward.started == 2  # none was started for the one that has ended

    with_reward(
        spec_of(write(tmp_path, text)), tmp_path / "log", scenario, processes=1, deadline_seconds=120.0, clock=clock
    )


def test_the_start_of_a_process_is_on_nobodys_deadline(tmp_path: Path) -> None:
    text = (
        "import time\ntime.sleep(1.0)\n"
        "def compute_score(solution_str, **row):\n    while solution_str == 'hang': pass\n    return 1"
    )

    async def scenario(reward: ProcessReward) -> None:
        bounded = BoundedReward(RewardConfig(num_workers=2, timeout_seconds=0.5), reward)
        calls = (bounded.score(prompt(), response) for response in ("hang", "hang", "?", "hang", "hang", "?"))
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [
            *(RewardTimeout, RewardTimeout, Score),
            *(RewardTimeout, RewardTimeout, Score),
        ]

    with_reward(spec_of(write(tmp_path, text)), tmp_path / "log", scenario, deadline_seconds=0.5)


def test_everybody_who_waits_learns_that_no_process_can_be_started(tmp_path: Path) -> None:
    path = write(tmp_path, HOSTILE)

    async def scenario(reward: ProcessReward) -> None:
        path.unlink()
        results = await asyncio.gather(*(outcome(reward, response) for response in ("exit", "42", "42", "42")))
        assert results[0] == "reward: its process ended with 3"
        assert all("no process can be started any more" in result for result in results[1:])
        write(tmp_path, HOSTILE)
        assert await outcome(reward, "42") == "1.0"

    with_reward(spec_of(path), tmp_path / "log", scenario, processes=1)


def test_a_start_is_not_lost_when_whoever_waited_for_it_gives_up(tmp_path: Path) -> None:
    async def scenario(reward: ProcessReward) -> None:
        hanging = [asyncio.ensure_future(outcome(reward, "hang", deadline=1.0)) for _ in range(2)]
        await asyncio.sleep(0)
        assert await outcome(reward, "42", deadline=0.01) == "deadline"
        assert await asyncio.gather(*hanging) == ["deadline"] * 2
        assert await outcome(reward, "42") == "1.0"

    with_reward(spec_of(write(tmp_path, HOSTILE)), tmp_path / "log", scenario)


def test_no_more_processes_than_allowed(tmp_path: Path) -> None:
    async def scenario(reward: ProcessReward) -> None:
        results = await asyncio.gather(*(outcome(reward, "42") for _ in range(50)))
        assert results == ["1.0"] * 50
        assert reward.started <= 2

    with_reward(spec_of(write(tmp_path, HOSTILE)), tmp_path / "log", scenario)


def test_what_a_function_has_started_ends_with_its_process(tmp_path: Path) -> None:
    children: list[int] = []

    async def scenario(reward: ProcessReward) -> None:
        score = await reward.score(prompt(), "child")
        children.append(int(score.metrics["child"]))
        assert lives(children[0])
        assert await outcome(reward, "hang", deadline=0.1) == "deadline"  # perhaps in the other process
        assert reward.most_children == 1

    with_reward(spec_of(write(tmp_path, HOSTILE)), tmp_path / "log", scenario)
    until_gone(children[0])


def test_a_process_with_many_children_is_replaced(tmp_path: Path) -> None:
    async def scenario(reward: ProcessReward) -> None:
        pids = [int((await reward.score(prompt(), "child")).metrics["child"]) for _ in range(MOST_CHILDREN + 1)]
        for pid in pids:
            until_gone(pid)
        assert await outcome(reward, "42") == "1.0"
        assert reward.started == 2

    with_reward(spec_of(write(tmp_path, HOSTILE)), tmp_path / "log", scenario, processes=1)


def test_an_async_function_has_one_process_for_many_calls(tmp_path: Path) -> None:
    async def scenario(reward: ProcessReward) -> None:
        assert reward.is_async
        assert await asyncio.gather(*(outcome(reward, "42") for _ in range(50))) == ["1.0"] * 50
        assert reward.started == 1

    with_reward(spec_of(write(tmp_path, ASYNC)), tmp_path / "log", scenario)


def test_an_async_call_that_waits_too_long_is_cancelled_alone(tmp_path: Path) -> None:
    async def scenario(reward: ProcessReward) -> None:
        waiting = asyncio.ensure_future(outcome(reward, "wait", deadline=0.3))
        assert await outcome(reward, "42") == "1.0"
        assert await waiting == "deadline"
        assert await outcome(reward, "42") == "1.0"
        assert reward.started == 1

    with_reward(spec_of(write(tmp_path, ASYNC)), tmp_path / "log", scenario)


def test_an_async_call_that_blocks_is_named_and_the_others_are_made_again(tmp_path: Path) -> None:
    async def scenario(reward: ProcessReward) -> None:
        results = await asyncio.gather(*(outcome(reward, response) for response in ("42", "block", "42", "4")))
        line = "reward: kept its event loop from turning for 2 s: await what takes long, or use def"
        assert results == ["1.0", line, "1.0", "0.0"]
        assert reward.started == 2

    with_reward(spec_of(write(tmp_path, ASYNC)), tmp_path / "log", scenario)


def test_an_async_call_that_ends_its_process_twice_has_no_score(tmp_path: Path) -> None:
    async def scenario(reward: ProcessReward) -> None:
        assert await outcome(reward, "exit") == "reward: its process ended with 3, twice"
        assert await outcome(reward, "42") == "1.0"

    with_reward(spec_of(write(tmp_path, ASYNC)), tmp_path / "log", scenario)


def test_a_judge_that_cannot_be_reached_is_asked_again(tmp_path: Path) -> None:
    async def scenario(reward: ProcessReward) -> None:
        assert await outcome(reward, "flaky") == "0.0"
        assert await outcome(reward, "broken") == "reward: ConnectionError: always"
        assert await outcome(reward, "count") == "3.0"

    with_reward(spec_of(write(tmp_path, ASYNC)), tmp_path / "log", scenario)


def test_a_function_that_cannot_be_loaded_any_more_fails_its_calls_until_it_can(tmp_path: Path) -> None:
    path = write(tmp_path, HOSTILE)

    async def scenario(reward: ProcessReward) -> None:
        path.unlink()
        assert await outcome(reward, "exit") == "reward: its process ended with 3"
        assert "no process can be started any more" in await outcome(reward, "42")
        write(tmp_path, HOSTILE)
        assert await outcome(reward, "42") == "1.0"

    with_reward(spec_of(path), tmp_path / "log", scenario, processes=1)


@pytest.mark.parametrize(
    ("text", "line"),
    [("import no_such_library", "ModuleNotFoundError"), ("import os; os._exit(7)", "its process ended with 7 while")],
)
def test_a_function_that_cannot_be_loaded_is_refused(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        asyncio.run(open_reward(spec_of(write(tmp_path, text)), tmp_path / "log", 2, 30.0))


def test_nothing_is_left_when_it_is_closed(tmp_path: Path) -> None:
    pids: list[int] = []

    async def scenario(reward: ProcessReward) -> None:
        score = await reward.score(prompt(), "?")
        pids.append(int(score.metrics["pid"]))

    path = write(tmp_path, "import os\ndef compute_score(**row):\n    return {'score': 1, 'pid': os.getpid()}")
    with_reward(spec_of(path), tmp_path / "log", scenario)
    assert pids[0] != os.getpid()
    assert not lives(pids[0])
