"""Kills replicas of a run on Ray with SIGKILL, at every point of a weight sync, and checks what became of the run.

    python -m benchmarks.kill_replica --directory /tmp/kills [--rounds 2] [--points stage,bound] [--updates-per-kill 60]

The whole run is `paceline train` but for hosts that can be held at a point (`held_hosts`). A killer waits there for one
of two replicas, kills it, lets the rest go on, and waits until it is READY again. After each return the bytes that it
serves are read out of its memory and hashed. At the end the event log is folded: every admitted sample ended exactly
once, nothing was trained twice, only verified versions were confirmed, nobody was lost who was not killed, every death
was noticed within 3 s and every victim READY again within 20 s.
Prints a line per kill and a table; exits with 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.held_hosts import HELD_HOSTS, HOLD_DIR, POINTS
from paceline.core.errors import PacelineError
from paceline.store.serving_table import hash_served

T = TypeVar("T")
Event = dict[str, Any]

ROOT = Path(__file__).parents[1]
REPLICAS = 2
IN_A_REPLICA = ("stage", "staged", "swap", "bind", "bound", "swapped")
PATIENCE_SECONDS = 120.0
MAX_NOTICE_SECONDS = 3.0
MAX_RETURN_SECONDS = 20.0
SETTINGS = [
    f"rollout.num_replicas={REPLICAS}",
    "rollout.max_replica_restarts=1000",
    "rollout.max_sample_losses=1000",
    "trainer.test_freq=0",
    "trainer.val_before_train=false",
    "data.val_size=50",
    "trainer.logger=[]",
]


@dataclass(frozen=True)
class Kill:
    """One kill: where, whom, until it was noticed and until it was READY again, and what it served then."""

    point: str
    victim: str
    lost_seconds: float
    ready_seconds: float
    digest_is_right: bool


@dataclass
class Verdict:
    """What a run's log says in the end."""

    problems: list[str] = field(default_factory=list)
    admitted: int = 0
    trained: int = 0
    zombies: int = 0
    versions: int = 0


class LiveRun:
    """A started run and its event log."""

    def __init__(self, directory: Path, updates: int, settings: Sequence[str]) -> None:
        directory.mkdir(parents=True)
        self.directory = directory
        self.hold = directory / "hold"
        self.hold.mkdir()
        (self.hold / "pace").touch()
        self.struck: Counter[str] = (
            Counter()
        )  # kills by victim, those whose return the run did not live to see included
        overrides = [*SETTINGS, f"rollout.total_rollout_steps={64 * updates}", *settings]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, HOLD_DIR: str(self.hold), "PYTHONPATH": path}
        with (directory / "out").open("wb") as out, (directory / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.kill_replica", "--run", *overrides],
                cwd=directory,
                env=environment,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def is_over(self) -> bool:
        """It has ended."""
        return self.process.poll() is not None

    @property
    def run_dir(self) -> Path | None:
        """Its directory, once it is there."""
        return next((file.parent for file in self.directory.glob("runs/*/*/*/events.jsonl")), None)

    def events(self, *kinds: str) -> list[Event]:
        """Whole lines of these kinds so far."""
        if self.run_dir is None:
            return []
        lines = (self.run_dir / "events.jsonl").read_bytes().split(b"\n")[:-1]
        found = [json.loads(line) for line in lines if any(kind.encode() in line for kind in kinds)]
        return [event for event in found if event["kind"] in kinds]

    def until(self, look: Callable[[], T | None], seconds: float = PATIENCE_SECONDS) -> T | None:
        """The first value that is true; None when the run ends or the time is over."""
        deadline = time.monotonic() + seconds
        while not self.is_over and time.monotonic() < deadline:
            if value := look():
                return value
            time.sleep(0.02)
        return None

    def pid_of(self, role: str) -> int:
        """Of the newest process of a role."""
        return next(int(e["pid"]) for e in reversed(self.events("process.started")) if e["role"] == role)

    def published_after(self, wall: float) -> list[Event]:
        """Versions that all replicas have confirmed after this moment."""
        found = self.events("sync.completed")
        return [event for event in found if event["t"] > wall and len(event["pauses"]) == REPLICAS]


def kill_at(run: LiveRun, point: str, victim: str) -> Kill | None:
    """Wait until the run is at this point, kill the victim, let the run go on, wait for the victim's return. None when
    the run is over.
    """
    if run.until(lambda: run.published_after(time.time() - 3600)) is None:
        return None
    role = victim if point in IN_A_REPLICA else "*"
    reached, wanted = run.hold / "reached", run.hold / "wanted"
    reached.unlink(missing_ok=True)
    part = run.hold / "wanted.part"
    part.write_text(f"{point} {role}", encoding="utf-8")
    part.replace(wanted)
    try:
        if run.until(reached.exists) is None:
            return None
        killed = time.time()
        os.kill(run.pid_of(victim), signal.SIGKILL)
        run.struck[victim] += 1
    finally:
        wanted.unlink(missing_ok=True)
    return _return_of(run, point, victim, killed)


def _return_of(run: LiveRun, point: str, victim: str, killed: float) -> Kill | None:
    def first(state: str) -> float | None:
        found = [e["t"] for e in run.events("replica.changed") if e["replica"] == victim and e["state"] == state]
        return next((t for t in found if t > killed), None)

    ready = run.until(lambda: first("ready"))
    if ready is None or run.until(lambda: run.published_after(ready)) is None:
        return None
    lost = first("lost") or killed
    return Kill(point, victim, lost - killed, ready - killed, _serves_what_was_captured(run, victim))


def _serves_what_was_captured(run: LiveRun, victim: str) -> bool:
    """Whether the bytes in the replica's memory have the digest of the snapshot; its word is not taken for it."""
    for _ in range(5):  # a table that is being replaced is read again
        try:
            version, digest = hash_served(str(run.run_dir / "serving" / f"{victim}.json" if run.run_dir else victim))
        except PacelineError:
            time.sleep(0.2)
            continue
        captured = {event["version"]: event["digest"] for event in run.events("sync.captured")}
        return captured.get(version) == digest
    return False


def judge(run: LiveRun) -> Verdict:
    """Fold the whole log, independently of the program's own summary."""
    verdict = Verdict()
    admitted: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    captured: dict[int, str] = {}
    kinds = ["sample.admitted", "sample.trained", "sample.dropped", "sample.failed"]
    for event in run.events(*kinds, "sync.captured", "sync.confirmed", "sync.completed", "zombies.refused"):
        match event["kind"]:
            case "sample.admitted":
                admitted.update(event["ids"])
            case "sample.trained" | "sample.dropped" | "sample.failed":
                ended.update(event["ids"])
                verdict.trained += len(event["ids"]) if event["kind"] == "sample.trained" else 0
            case "sync.captured":
                captured[event["version"]] = event["digest"]
            case "sync.confirmed":
                if captured.get(event["version"]) != event["digest"]:
                    verdict.problems.append(f"{event['replica']} confirmed {event['version']} with another digest")
            case "sync.completed":
                verdict.versions += 1
                if not event["verified"]:
                    verdict.problems.append(f"version {event['version']} was published unverified")
            case _:
                verdict.zombies += event["completions"]
    verdict.admitted = len(admitted)
    verdict.problems += [f"{one} was admitted {count} times" for one, count in admitted.items() if count > 1]
    verdict.problems += [f"{one} ended {count} times" for one, count in ended.items() if count > 1]
    verdict.problems += [f"{one} never ended" for one in admitted.keys() - ended.keys()]
    verdict.problems += [f"{one} ended and never began" for one in ended.keys() - admitted.keys()]
    changed = Counter((e["replica"], e["state"]) for e in run.events("replica.changed"))
    verdict.problems += [
        f"{name} was {state} {count} times, killed {run.struck[name]} times"
        for (name, state), count in changed.items()
        if state in ("lost", "fenced") and count > run.struck[name]
    ]
    return verdict


def run_with_kills(
    directory: Path, wanted: Sequence[tuple[str, str]], updates_per_kill: int, settings: Sequence[str]
) -> tuple[list[Kill], Verdict]:
    """One run with as many of the kills as it lives for; it has to come to its end."""
    run = LiveRun(directory, updates_per_kill * len(wanted), settings)
    kills: list[Kill] = []
    for point, victim in wanted:
        kill = kill_at(run, point, victim)
        if kill is None:
            break
        kills.append(kill)
        sys.stdout.write(
            f"{point:<16} {victim}: lost after {kill.lost_seconds:.2f} s, ready {kill.ready_seconds:.1f} s\n"
        )
        sys.stdout.flush()
    (run.hold / "pace").unlink()
    code = run.process.wait(timeout=1800)
    verdict = judge(run)
    if code != 0:
        error = (directory / "err").read_text(encoding="utf-8").strip()
        verdict.problems.append(f"the run ended with {code}: {error}")
    verdict.problems += [
        f"{kill.victim} served another digest after {kill.point}" for kill in kills if not kill.digest_is_right
    ]
    verdict.problems += [
        f"the death of {kill.victim} in {kill.point} was noticed after {kill.lost_seconds:.1f} s"
        for kill in kills
        if kill.lost_seconds > MAX_NOTICE_SECONDS
    ]
    verdict.problems += [
        f"{kill.victim} was READY {kill.ready_seconds:.1f} s after its death in {kill.point}"
        for kill in kills
        if kill.ready_seconds > MAX_RETURN_SECONDS
    ]
    return kills, verdict


def table(kills: Sequence[Kill]) -> str:
    """One line per point."""
    lines = [f"{'point':<16}{'kills':>6}{'lost, s (max)':>16}{'READY, s (max)':>16}{'digest proved':>15}"]
    for point in POINTS:
        mine = [kill for kill in kills if kill.point == point]
        if mine:
            lost, ready = max(k.lost_seconds for k in mine), max(k.ready_seconds for k in mine)
            proved = sum(kill.digest_is_right for kill in mine)
            lines.append(f"{point:<16}{len(mine):>6}{lost:>16.2f}{ready:>16.1f}{proved:>15}")
    return "\n".join(lines)


def strike(directory: Path, points: Sequence[str], kills_per_run: int, updates_per_kill: int) -> int:
    """All kills, in as many runs as they take; 1 when something is wrong."""
    left = [(point, f"replica-{index % REPLICAS}") for index, point in enumerate(points)]
    kills: list[Kill] = []
    problems: list[str] = []
    admitted = trained = zombies = versions = runs = 0
    while left:
        done, verdict = run_with_kills(directory / f"run-{runs}", left[:kills_per_run], updates_per_kill, [])
        problems += verdict.problems
        admitted, trained = admitted + verdict.admitted, trained + verdict.trained
        zombies, versions, runs = zombies + verdict.zombies, versions + verdict.versions, runs + 1
        if not done:
            problems.append("a run ended before it could be killed")
            break
        kills += done
        left = left[len(done) :]
    sys.stdout.write(
        f"{table(kills)}\n{len(kills)} kills in {runs} runs: {versions} versions, {admitted} samples admitted, "
    )
    sys.stdout.write(f"{trained} trained, {zombies} late responses refused, {len(problems)} problems\n")
    sys.stdout.write("".join(f"  {problem}\n" for problem in problems))
    return int(bool(problems))


def train_held(overrides: Sequence[str]) -> int:
    """`paceline train` with the hosts that can be held."""
    from paceline.cli.config_files import load_config
    from paceline.runtime.task_runner import run_training

    return run_training(load_config(None, overrides), command_wall=time.time(), hosts=HELD_HOSTS)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="emptied first")
    parser.add_argument("--rounds", type=int, default=2, help="kills per point")
    parser.add_argument("--points", default=",".join(POINTS))
    parser.add_argument("--kills-per-run", type=int, default=8)
    parser.add_argument("--updates-per-kill", type=int, default=60)
    options = parser.parse_args()
    shutil.rmtree(options.directory, ignore_errors=True)
    points = options.points.split(",") * options.rounds
    return strike(options.directory.absolute(), points, options.kills_per_run, options.updates_per_kill)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        code = 1
        try:
            code = train_held(sys.argv[2:])
        except PacelineError as error:
            sys.stderr.write(f"{error.message}\n")
        sys.stderr.flush()
        os._exit(code)  # as the command does: Ray's own end of the process is not waited for
    sys.exit(main())
