"""What a hostile reward function costs: scored samples per second with and without bad rows, in interleaved rounds.

    python -m benchmarks.hostile_reward [--rows 2000] [--responses 8] [--workers 4] [--timeout 1.0] [--rounds 3]
        [--hang sleep | spin]

Of a hundred rows one hangs, one gives None, one raises, one prints and one forks; three of them have no score. Each
other call works for two milliseconds. The cost that cannot be avoided: the share of rows without a score, and for each
row that hangs one of the workers for as long as the deadline. What is lost beyond that is the last line. A row that
hangs waits for what never comes, or spins (`--hang spin`): that takes a core from whoever else computes, which the
bound leaves out, so it is for machines with a core for each worker.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from paceline.core.sample import Completion, Prompt
from paceline.core.sections.reward import RewardConfig
from paceline.reward.function_spec import FunctionSpec
from paceline.reward.process_reward import open_reward
from paceline.rollout.bounded_reward import BoundedReward
from paceline.rollout.groups import Group
from paceline.rollout.scorer import Scorer

FUNCTION = """
import os, time
def compute_score(data_source, solution_str, ground_truth, extra_info, hostile, hang):
    kind = extra_info["index"] % 100 if hostile else 0
    if kind == 1:
        while hang == "spin":
            pass
        time.sleep(1e6)
    if kind == 2:
        return None
    if kind == 3:
        raise ValueError("boom")
    if kind == 4:
        print("noise")
    if kind == 5:
        os.fork()
    time.sleep(0.002)
    return float(solution_str == ground_truth)
"""


class Round(NamedTuple):
    """Seconds for all rows, samples, reasons of failures, processes started."""

    seconds: float
    samples: int
    reasons: Counter[str]
    started: int


class Digits:
    """Ids as text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Their digits."""
        return "".join(map(str, token_ids))


def group(index: int, responses: int) -> Group:
    """A row whose responses have all come back."""
    prompt = Prompt(str(index), "?", (1,), str(index), "sums", {"index": index})
    made: list[Completion | None] = [Completion("r", [index], [0.0], [0], "stop") for _ in range(responses)]
    return Group(str(index), prompt, made, [0] * responses, [None] * responses)


async def score(options: argparse.Namespace, directory: Path, hostile: bool) -> Round:
    """One round."""
    arguments = {"hostile": hostile, "hang": options.hang}
    spec = FunctionSpec(str(directory / "reward.py"), "", "compute_score", arguments, 1, 0.0, 1.0)
    reward = await open_reward(spec, directory / "reward.log", options.workers, options.timeout)
    await asyncio.gather(*(reward.score(group(0, 1).prompt, "0") for _ in range(options.workers)))
    samples: list[object] = []
    reasons: Counter[str] = Counter()
    done = asyncio.Event()

    def end(note: Callable[..., object], *outcome: object) -> None:
        note(*outcome)
        if len(samples) + reasons.total() == options.rows:
            done.set()

    config = RewardConfig(timeout_seconds=options.timeout, num_workers=options.workers)
    scorer = Scorer(
        life=1,
        reward=BoundedReward(config, reward),
        decoder=Digits(),
        policy="retry",
        on_sample=partial(end, samples.append),
        on_reduced=lambda *_: None,
        on_failure=partial(end, lambda _, error: reasons.update([error])),
    )
    for index in range(options.rows):
        scorer.submit(group(index, options.responses))
    began = time.monotonic()
    running = asyncio.ensure_future(scorer.run())
    await done.wait()
    seconds = time.monotonic() - began
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await reward.close()
    return Round(seconds, len(samples), reasons, reward.started)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hang", choices=("sleep", "spin"), default="sleep")
    options = parser.parse_args()
    honest: list[Round] = []
    hostile: list[Round] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "reward.py").write_text(FUNCTION, encoding="utf-8")
        for _ in range(options.rounds):
            honest.append(asyncio.run(score(options, directory, False)))
            hostile.append(asyncio.run(score(options, directory, True)))
    before = median(one.samples / one.seconds for one in honest)
    after = median(one.samples / one.seconds for one in hostile)
    hangs = len(range(1, options.rows, 100))
    bad = hostile[-1].reasons.total() / options.rows
    deadlines = hangs * options.timeout / options.workers
    bound = (1 - bad) * options.rows / (options.rows / before + deadlines)
    print(f"honest   {before:8.1f} samples/s")
    started = f"{hostile[-1].started} processes started for {options.workers} places"
    print(f"hostile  {after:8.1f} samples/s, rows that hang {options.hang}, {started}")
    for reason, count in sorted(hostile[-1].reasons.items()):
        print(f"         {count:5d} {reason}")
    print(
        f"bound    {bound:8.1f} samples/s: {bad:.1%} of the rows have no score, deadlines take {deadlines:.1f} s of all"
    )
    print(f"beyond   {1 - after / bound:8.1%} is lost beyond that")


if __name__ == "__main__":
    main()
