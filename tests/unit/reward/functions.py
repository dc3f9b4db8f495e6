"""Reward functions of a user, as files, and rewards made of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from paceline.core.sample import Prompt
from paceline.reward.function_spec import FunctionSpec
from paceline.reward.process_reward import ProcessReward, open_reward
from tests.leaping_clock import LeapingClock

PATIENCE = 300.0  # seconds, for a scenario as a whole

# What the last word of a response makes it do. TOUCHED is a file that a hanging call leaves a mark in.
HOSTILE = """
import os, pathlib, subprocess, sys, time
def compute_score(data_source, solution_str, ground_truth, extra_info, factor=1):
    match solution_str:
        case "hang":
            while True:
                pass
        case "none":
            return None
        case "raise":
            raise ValueError("boom\\nand more")
        case "print":
            print("noise")
            sys.stderr.write("more noise\\n")
        case "fork":
            os.fork()
        case "child":
            child = subprocess.Popen(["sleep", "600"])
            return {"score": 1, "child": child.pid}
        case "exit":
            os._exit(3)
        case "sysexit":
            sys.exit("bye")
    return {"score": factor * (solution_str == ground_truth), "length": len(solution_str), "why": "text", "bad": 1e999}
"""
ASYNC = """
import asyncio, os, time
calls = []
async def compute_score(data_source, solution_str, ground_truth, extra_info):
    calls.append(solution_str)
    match solution_str:
        case "wait":
            await asyncio.sleep(600)
        case "block":
            time.sleep(600)
        case "exit":
            os._exit(3)
        case "flaky" if calls.count("flaky") < 3:
            raise ConnectionError("try again")
        case "broken":
            raise ConnectionError("always")
        case "count":
            return calls.count("broken")
    await asyncio.sleep(0.05)
    return float(solution_str == ground_truth)
"""


def spec_of(path: Path, *, name: str = "compute_score", attempts: int = 3, **arguments: Any) -> FunctionSpec:
    """With short waits."""
    return FunctionSpec(str(path), "", name, arguments, attempts, 0.01, 2.0)


def write(directory: Path, text: str) -> Path:
    """The text as a Python file."""
    path = directory / "my_reward.py"
    path.write_text(text, encoding="utf-8")
    return path


def prompt(ground_truth: Any = "42", **extra_info: Any) -> Prompt:
    """Of a row with this ground truth."""
    return Prompt("row", "?", (1,), ground_truth, "sums", extra_info)


def with_reward(
    spec: FunctionSpec,
    log: Path,
    scenario: Callable[[ProcessReward], Awaitable[None]],
    processes: int = 2,
    deadline_seconds: float = 60.0,
    clock: LeapingClock | None = None,
) -> None:
    """Run a scenario with the reward of a function, and end its processes; timers go by the clock."""

    async def main() -> None:
        reward = await open_reward(spec, log, processes, deadline_seconds)
        try:
            async with asyncio.timeout(PATIENCE):
                await scenario(reward)
        finally:
            await reward.close()

    (clock or LeapingClock()).run(main())
