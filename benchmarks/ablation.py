"""Staleness and its corrections on the shipped model, and TRL's GRPOTrainer on the same model, task and batch.

    python -m benchmarks.ablation --directory /tmp/ablation [--updates 80] [--seeds 0,1,2] [--settings NAME,NAME]
                                  [--trl-python .venv-trl/bin/python] [--json FILE] [--page docs/ablation.md]

Settings: on-policy (threshold 0, a sync after each update); and for each staleness threshold 0.5, 1 and 3, with a sync
every 2 updates: bypass (the ratio is to the rollout's log-probs), decoupled PPO (to the log-probs of the weights of the
last sync) and TIS (decoupled, with importance weights per token truncated at 2). Seeds are the outer loop, so that a
machine that changes its pace changes it for all settings. Every run is a `paceline train` of its own.

Of each run: accuracy of the last validation (greedy, 2,000 problems), seconds from the begin of training to the end of
the first validation of at least 0.75, mean effective sample size (share of tokens), mean version lag, responses/s.
TRL: see `benchmarks.trl_grpo`; it runs in an environment that has trl, with this package on its path.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GOAL = 0.75
THRESHOLDS = (0.5, 1.0, 3.0)
CORRECTION = "algorithm.rollout_correction"
CORRECTIONS: dict[str, list[str]] = {
    "bypass": [],
    "decoupled": [f"{CORRECTION}.bypass_mode=false"],
    "TIS": [f"{CORRECTION}.bypass_mode=false", f"{CORRECTION}.rollout_is=token"],
}
SETTINGS: dict[str, list[str]] = {
    "on-policy": ["async_training.staleness_threshold=0", "async_training.trigger_parameter_sync_step=1"],
    **{
        f"{name} {threshold:g}": [f"async_training.staleness_threshold={threshold:g}", *keys]
        for threshold in THRESHOLDS
        for name, keys in CORRECTIONS.items()
    },
}
TRL = "TRL GRPOTrainer"
PROMPTS, RESPONSES = 64, 8  # of one update, here and there
PAGE = """# Staleness and its corrections

Measured by `benchmarks/ablation.py` on {day} on a machine with {cores} cores, {updates} updates of 512 responses on
the shipped model and task, {seeds} seeds, the settings of one seed one after another. Means over the seeds; of the
accuracy the range too. Accuracy is greedy, on 2,000 problems that training never sees. Time runs from the first
published version to the end of the first validation of at least {goal}. The effective sample size is under the ratio
of the trained policy to the one that sampled, as a share of the tokens; TRL trains on-policy, so it has none.
Settings are explained at the top of the script, corrections in [learning.md](learning.md).

{table}

![accuracy over seconds of training](images/ablation.svg)
"""


@dataclass(frozen=True)
class Run:
    """What one run came to; `curve` has (seconds from the begin of training, accuracy)."""

    setting: str
    seed: int
    accuracy: float
    seconds_to_goal: float | None
    effective_sample_size: float
    lag: float
    responses_per_second: float
    curve: list[tuple[float, float]]


def train(setting: str, seed: int, updates: int, directory: Path) -> Run:
    """One `paceline train`, folded from its event log."""
    command = [
        *(str(Path(sys.executable).with_name("paceline")), "train", *SETTINGS[setting]),
        f"trainer.seed={seed}",
        f"data.seed={seed}",
        f"rollout.total_rollout_steps={updates * PROMPTS}",
        f"trainer.default_local_dir={directory}",
        f"trainer.project_name={setting.replace(' ', '-')}",
        f"trainer.experiment_name=seed-{seed}",
        *("trainer.save_freq=0", "trainer.resume_mode=disable", "trainer.logger=[]"),
        f"trainer.test_freq={5 if setting != 'on-policy' else 10}",  # so many versions are 10 updates in all settings
    ]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    log = max((directory / setting.replace(" ", "-") / f"seed-{seed}").glob("*/events.jsonl"))
    return fold(setting, seed, [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()])


def fold(setting: str, seed: int, events: Sequence[Mapping[str, Any]]) -> Run:
    """The figures of a run from its event log."""
    steps = [event for event in events if event["kind"] == "train.step"]
    begin = next(event["t"] for event in events if event["kind"] == "sync.completed")
    curve = [
        (event["t"] - begin, event["accuracy"])
        for event in sorted(events, key=lambda event: float(event["t"]))
        if event["kind"] == "validation.finished"
    ]
    lags: dict[int, int] = {}
    for event in events:
        if event["kind"] == "sample.trained":
            for lag, tokens in event["lags"].items():
                lags[int(lag)] = lags.get(int(lag), 0) + tokens
    seconds = max(event["t"] for event in steps) - begin
    return Run(
        setting=setting,
        seed=seed,
        accuracy=curve[-1][1],
        seconds_to_goal=_first(curve),
        effective_sample_size=statistics.fmean(
            step["metrics"]["rollout_corr/rollout_is_eff_sample_size"] for step in steps
        ),
        lag=sum(lag * tokens for lag, tokens in lags.items()) / sum(lags.values()),
        responses_per_second=sum(step["sequences"] for step in steps) / seconds,
        curve=curve,
    )


def train_trl(python: Path, seed: int, updates: int, directory: Path) -> Run:
    """One run of `benchmarks.trl_grpo` under another interpreter."""
    result = directory / f"trl-{seed}.json"
    command = [str(python), "-m", "benchmarks.trl_grpo", "--seed", str(seed), "--updates", str(updates)]
    subprocess.run([*command, "--json", str(result)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    found = json.loads(result.read_text(encoding="utf-8"))
    curve = [(float(seconds), float(accuracy)) for seconds, accuracy in found["curve"]]
    return Run(TRL, seed, curve[-1][1], _first(curve), 1.0, 0.0, float(found["responses_per_second"]), curve)


def _first(curve: Iterable[tuple[float, float]]) -> float | None:
    return next((seconds for seconds, accuracy in curve if accuracy >= GOAL), None)


def table(runs: Sequence[Run]) -> str:
    """Markdown: means over the seeds, and the range of the accuracy."""
    lines = [
        f"| setting | accuracy at the end | seconds to {GOAL} | effective sample size | version lag | responses/s |",
        "|---|---|---|---|---|---|",
    ]
    for setting in dict.fromkeys(run.setting for run in runs):
        mine = [run for run in runs if run.setting == setting]
        accuracies = [run.accuracy for run in mine]
        reached = [run.seconds_to_goal for run in mine if run.seconds_to_goal is not None]
        to_goal = f"{statistics.fmean(reached):.1f}" if len(reached) == len(mine) else f"{len(reached)} of {len(mine)}"
        lines.append(
            f"| {setting} | {statistics.fmean(accuracies):.4f} ({min(accuracies):.4f}-{max(accuracies):.4f}) "
            f"| {to_goal} | {statistics.fmean(run.effective_sample_size for run in mine):.3f} "
            f"| {statistics.fmean(run.lag for run in mine):.2f} "
            f"| {statistics.fmean(run.responses_per_second for run in mine):.0f} |"
        )
    return "\n".join(lines)


def page(runs: Sequence[Run], updates: int) -> str:
    """The page in the docs."""
    seeds = len({run.seed for run in runs})
    cores = len(os.sched_getaffinity(0))
    return PAGE.format(
        day=f"{datetime.datetime.now(tz=datetime.UTC):%-d %B %Y}",
        cores=cores,
        updates=updates,
        seeds=seeds,
        goal=GOAL,
        table=table(runs),
    )


def plot(runs: Sequence[Run], file: Path) -> None:
    """Accuracy over seconds of training, one line per run, one colour per setting."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    settings = list(dict.fromkeys(run.setting for run in runs))
    panels = [[name for name in settings if name.endswith(f" {threshold:g}")] for threshold in THRESHOLDS]
    always = [name for name in settings if name in ("on-policy", TRL)]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(12, 3.6), sharey=True)
    for axis, names, threshold in zip(axes, panels, THRESHOLDS, strict=True):
        for number, name in enumerate([*always, *names]):
            for run in (run for run in runs if run.setting == name):
                seconds, accuracies = zip(*run.curve, strict=True)
                label = name if run.seed == runs[0].seed else None
                axis.plot(seconds, accuracies, color=f"C{number}", linewidth=1, label=label)
        axis.axhline(GOAL, color="grey", linewidth=0.5)
        axis.set_title(f"staleness threshold {threshold:g}")
        axis.set_xlabel("seconds of training")
        axis.legend(fontsize="small", loc="lower right")
    axes[0].set_ylabel("accuracy")
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--updates", type=int, default=80)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--trl-python", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="writes the page, and its plot to images/ beside it")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    runs: list[Run] = []
    for seed in map(int, arguments.seeds.split(",")):
        if arguments.trl_python is not None:
            runs.append(train_trl(arguments.trl_python, seed, arguments.updates, arguments.directory))
        for setting in arguments.settings.split(","):
            runs.append(train(setting, seed, arguments.updates, arguments.directory))
            print(json.dumps({**asdict(runs[-1]), "curve": len(runs[-1].curve)}), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(run) for run in runs], indent=1), encoding="utf-8")
    if arguments.page is not None:
        plot(runs, arguments.page.parent / "images" / "ablation.svg")
        arguments.page.write_text(page(runs, arguments.updates), encoding="utf-8")
    print(table(runs))


if __name__ == "__main__":
    main()
