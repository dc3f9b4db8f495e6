"""Kills a run at random moments, resumes it with the same command line, and checks what it has trained.

    python -m benchmarks.kill_resume --kills 30 --directory /tmp/kills

Each kill is `kill -9` of the trainer, the message queue, the rollouter or the whole run: whatever dies, the next
start goes on. Learning rate 0 keeps the policy as it is, so that all lengths are draws of one distribution. Prints one
line per kill and a summary, and exits with 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.lineage_check import Findings, check, kolmogorov_smirnov, lives_of, number_of, read_lines
from paceline.core.checkpoint import JournalledSequence
from paceline.store.token_journal import read_journal

PROGRAM = [sys.executable, "-c", "from paceline.cli.main import entry_point; entry_point()", "train"]
SETTINGS = [
    "data.val_size=50",
    "trainer.test_freq=0",
    "trainer.val_before_train=false",
    "trainer.save_freq=2",
    "trainer.logger=[console]",
    "actor.optim.lr=0",
]
TARGETS = ("trainer", "message_queue", "rollouter", "run")
GONE_SECONDS = 60.0
MAX_MADE_AGAIN = 0.05
MIN_P_VALUE = 0.01


class Plan(NamedTuple):
    """Kill `target` `seconds` after update `step`."""

    target: str
    step: int
    seconds: float


@dataclass
class Kill:
    """One kill. `sequences` are the unfinished responses at that moment, by what the journals hold of them."""

    target: str
    step: int
    sequences: list[JournalledSequence]


@dataclass
class Outcome:
    """One run from its beginning to its end."""

    run_dir: Path
    kills: list[Kill]
    findings: Findings
    resume_seconds: list[float]


def run_with_kills(
    directory: Path, updates: int, targets: Sequence[str], chance: random.Random, settings: Sequence[str]
) -> Outcome:
    """Train `updates` updates; on the way each target is killed in its turn."""
    directory.mkdir(parents=True)
    arguments = [*SETTINGS, f"rollout.total_rollout_steps={64 * updates}", *settings]
    done: list[Kill] = []
    process = start(directory, arguments)
    for index, target in enumerate(targets):
        share = (index + chance.random()) / len(targets)
        plan = Plan(target, max(3, int(share * (updates - 2))), chance.random() * 0.5)
        kill = kill_after(directory, process, index + 1, plan)
        if kill is None:
            break
        done.append(kill)
        process = start(directory, arguments)
        sys.stdout.write(f"killed {kill.target} after update {kill.step}, {len(kill.sequences)} responses in flight\n")
        sys.stdout.flush()
    if (code := process.wait()) != 0:
        raise SystemExit(f"the last start ended with {code}: {(directory / 'err').read_text(encoding='utf-8')}")
    run_dir = only_run(directory)
    resumes = [seconds for life in lives_of(run_dir)[1:] if (seconds := _to_first_update(life.events)) is not None]
    return Outcome(run_dir, done, check(run_dir), resumes)


def start(directory: Path, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """The same command line each time."""
    with (directory / "out").open("ab") as out, (directory / "err").open("wb") as err:
        return subprocess.Popen([*PROGRAM, *arguments], cwd=directory, stdout=out, stderr=err, start_new_session=True)


def kill_after(directory: Path, process: subprocess.Popen[bytes], starts: int, plan: Plan) -> Kill | None:
    """Kill as planned, once the life of so many starts has made an update; None when the run ended before."""
    while not _is_training(directory, starts) or _trained(directory) < plan.step:
        if process.poll() is not None:
            return None
        time.sleep(0.05)
    time.sleep(plan.seconds)
    run_dir = only_run(directory)
    pid = process.pid if plan.target == "run" else _pid_of(run_dir, plan.target)
    os.kill(pid, signal.SIGKILL)
    process.wait(timeout=GONE_SECONDS)
    _wait_until_gone(run_dir)
    life = lives_of(run_dir)[-1].number
    return Kill(plan.target, _trained(directory), unfinished(run_dir, life))


def unfinished(run_dir: Path, life: int) -> list[JournalledSequence]:
    """Responses in flight when this life ended: in its journal, of samples that were not trained."""
    trained = {one for e in lives_of(run_dir)[-1].events if e["kind"] == "sample.trained" for one in e["ids"]}
    found = read_journal(run_dir / "journal", [life])
    return [one for one in found if one.request_id.rpartition("/")[0] not in trained]


def made_again(kill: Kill, findings: Findings) -> tuple[int, int]:
    """Tokens in flight at a kill, and those of them that the trained response does not begin with."""
    in_flight = again = 0
    for sequence in kill.sequences:
        sample_id, _, place = sequence.request_id.rpartition("/")
        response = findings.responses.get((number_of(sample_id), int(place.partition("~")[0])))
        tokens = sequence.tokens.token_ids
        in_flight += len(tokens)
        kept = 0
        if response is not None:
            for mine, trained in zip(tokens, response["token_ids"], strict=False):
                if mine != trained:
                    break
                kept += 1
        again += len(tokens) - kept
    return in_flight, again


def lengths(outcome: Outcome) -> tuple[list[float], list[float]]:
    """Mean response length of each sample around the resumes (all of a stretch of numbers, so that none is chosen for
    its length), and of all others. Responses to one prompt are no independent draws; their mean is one value.
    """
    around: set[int] = set()
    for kill in outcome.kills:
        numbers = [number_of(one.request_id.rpartition("/")[0]) for one in kill.sequences]
        around.update(range(min(numbers, default=0), max(numbers, default=-1) + 1))
    of_sample: defaultdict[int, list[int]] = defaultdict(list)
    for (number, _), response in outcome.findings.responses.items():
        of_sample[number].append(len(response["token_ids"]))
    near: list[float] = []
    far: list[float] = []
    for number, each in of_sample.items():
        (near if number in around else far).append(sum(each) / len(each))
    return near, far


def only_run(directory: Path) -> Path:
    """The one run directory."""
    found = list(directory.glob("runs/*/*/*/events.jsonl"))
    if len(found) != 1:
        raise SystemExit(f"there are {len(found)} run directories below {directory}, not one")
    return found[0].parent


def _to_first_update(events: Sequence[dict[str, object]]) -> float | None:
    began = next(float(str(e["command_wall"])) for e in events if e["kind"] == "run.started")
    steps = [float(str(e["t"])) - float(str(e["seconds"])) for e in events if e["kind"] == "train.step"]
    return steps[0] - began if steps else None


def _trained(directory: Path) -> int:
    files = list(directory.glob("runs/*/*/*/events.jsonl"))
    steps = [e["step"] for file in files for e in read_lines(file) if e["kind"] == "train.step"]
    return steps[-1] if steps else 0


def _is_training(directory: Path, starts: int) -> bool:
    lives = [life for file in directory.glob("runs/*/*/*/events.jsonl") for life in lives_of(file.parent)]
    return len(lives) == starts and any(event["kind"] == "train.step" for event in lives[-1].events)


def _pid_of(run_dir: Path, role: str) -> int:
    events = lives_of(run_dir)[-1].events
    return next(int(e["pid"]) for e in reversed(events) if e["kind"] == "process.started" and e["role"] == role)


def _wait_until_gone(run_dir: Path) -> None:
    import fcntl

    with (run_dir / "processes.lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


def summarize(outcomes: Sequence[Outcome]) -> int:
    """Print what was found; 1 when something is wrong."""
    problems = [problem for outcome in outcomes for problem in outcome.findings.problems]
    counts = [made_again(kill, outcome.findings) for outcome in outcomes for kill in outcome.kills]
    in_flight, again = sum(flight for flight, _ in counts), sum(made for _, made in counts)
    near: list[float] = []
    far: list[float] = []
    for outcome in outcomes:
        one_near, one_far = lengths(outcome)
        near += one_near
        far += one_far
    statistic, p_value = kolmogorov_smirnov(near, far) if near and far else (0.0, 1.0)
    resumes = sorted(seconds for outcome in outcomes for seconds in outcome.resume_seconds)
    saves = [
        event["seconds"]
        for outcome in outcomes
        for event in read_lines(outcome.run_dir / "events.jsonl")
        if event["kind"] == "checkpoint.saved"
    ]
    report = {
        "kills": sum(len(outcome.kills) for outcome in outcomes),
        "trained_samples": sum(outcome.findings.trained for outcome in outcomes),
        "lost_lineage_samples": sum(outcome.findings.lost_samples for outcome in outcomes),
        "lost_lineage_updates": sum(outcome.findings.lost_updates for outcome in outcomes),
        "tokens_in_flight": in_flight,
        "tokens_made_again": again,
        "made_again_share": again / in_flight if in_flight else 0.0,
        "samples_near_resumes": len(near),
        "samples_elsewhere": len(far),
        "ks_statistic": statistic,
        "ks_p_value": p_value,
        "resume_to_first_update_seconds_p50": resumes[len(resumes) // 2] if resumes else None,
        "resume_to_first_update_seconds_max": resumes[-1] if resumes else None,
        "save_seconds_p50": sorted(saves)[len(saves) // 2] if saves else None,
        "save_seconds_max": max(saves, default=None),
        "problems": problems,
    }
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return int(bool(problems) or again > MAX_MADE_AGAIN * in_flight or p_value < MIN_P_VALUE)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="kills in all")
    parser.add_argument("--kills-per-run", type=int, default=5)
    parser.add_argument("--updates", type=int, default=40, help="updates per run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, required=True, help="emptied first")
    parser.add_argument("settings", nargs="*", help="further settings, key=value")
    options = parser.parse_args()
    shutil.rmtree(options.directory, ignore_errors=True)
    chance = random.Random(options.seed)
    outcomes: list[Outcome] = []
    left = options.kills
    while left > 0:
        kills = min(left, options.kills_per_run)
        done = options.kills - left
        targets = [TARGETS[(done + index) % len(TARGETS)] for index in range(kills)]
        directory = options.directory / f"run-{len(outcomes)}"
        outcomes.append(run_with_kills(directory, options.updates, targets, chance, options.settings))
        left -= kills
    return summarize(outcomes)


if __name__ == "__main__":
    sys.exit(main())
