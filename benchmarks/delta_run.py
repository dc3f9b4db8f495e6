"""A run that sends deltas: what each version moved to each replica, of how many bytes, and that it was proved.

    python benchmarks/delta_run.py --out DIRECTORY [--model DIRECTORY] [--versions 5] [--lr 1e-6] [key=value ...]

`--model` is what `scripts/make_smollm2.py` writes (SmolLM2-135M; its head says what to install), or any other Hugging
Face directory; without it, the shipped model on its own task. The run is an ordinary `paceline train` with two
replicas of the embedded engine in bfloat16 and `checkpoint_engine.backend=ray_object`. The reward of a response is the
share of its characters with an even code: a signal from the first step on, whatever the model can do. All figures are
folded from the event log; it is an error if any replica's digest was not proved, or if a version after the first moved
more than `--most` of the full bytes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.core.events import SyncCaptured, SyncCompleted, SyncConfirmed, SyncStaged
from paceline.core.version import Version
from paceline.observability.reader import Record, read_events

PROMPTS = 8
RESPONSES = 4
REPLICAS = 2
REWARD = '''"""The share of characters with an even code."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(ord(letter) % 2 == 0 for letter in solution_str) / max(1, len(solution_str))
'''


def settings(arguments: argparse.Namespace, reward: Path) -> list[str]:
    """The run's settings: a sync after each update, and as many updates as versions beyond the first."""
    chosen = [
        f"rollout.num_replicas={REPLICAS}",
        f"rollout.n={RESPONSES}",
        "rollout.dtype=bfloat16",
        f"rollout.total_rollout_steps={PROMPTS * (arguments.versions - 1)}",
        f"actor.ppo_mini_batch_size={PROMPTS}",
        f"actor.optim.lr={arguments.lr}",
        "actor.optim.lr_warmup_steps=0",
        "async_training.trigger_parameter_sync_step=1",
        f"reward.custom_reward_function.path={reward}",
        "trainer.test_freq=0",
        "trainer.save_freq=0",
        "trainer.grace_seconds=0",
        "trainer.val_before_train=false",
        f"trainer.default_local_dir={arguments.out.resolve() / 'runs'}",
        "checkpoint_engine.backend=ray_object",
        "checkpoint_engine.mode=delta",
        "checkpoint_engine.sync_timeout_seconds=300",
    ]
    if arguments.model is not None:
        chosen += [
            f"model.path={arguments.model.resolve()}",
            "rollout.max_num_seqs=16",
            "data.train_files=reasoning_gym:chain_sum",
            "data.max_prompt_length=192",
            "data.max_response_length=24",
            "data.val_size=4",
        ]
    return [*chosen, *arguments.settings]


def table(syncs: Sequence[SyncCompleted]) -> str:
    """One row per version."""
    lines = [
        "| version | changed | bytes to a replica | of full | compared and encoded in | sync | longest pause |",
        "|---|---|---|---|---|---|---|",
    ]
    for sync in syncs:
        changed = "-" if sync.changed_share is None else f"{sync.changed_share:.4%}"
        pause = max(sync.pauses.values(), default=0.0)
        lines.append(
            f"| {Version.unpack(sync.version).n} | {changed} | {sync.bytes:,} ({sync.mode}) | "
            f"{sync.bytes / sync.full_bytes:.3%} | {sync.encode_seconds * 1000:.0f} ms | {sync.seconds:.2f} s | "
            f"{pause * 1000:.1f} ms |"
        )
    return "\n".join(lines)


def faults(records: Sequence[Record], versions: int, most: float) -> list[str]:
    """What is not as it should be; empty when all is."""
    events = [record.event for record in records]
    captured = {event.version: event.digest for event in events if isinstance(event, SyncCaptured)}
    staged = [event for event in events if isinstance(event, SyncStaged)]
    confirmed = [event for event in events if isinstance(event, SyncConfirmed)]
    syncs = [event for event in events if isinstance(event, SyncCompleted)]
    found = [f"{len(syncs)} versions were published, not {versions}"] if len(syncs) != versions else []
    if len(confirmed) != versions * REPLICAS:
        found.append(f"{len(confirmed)} confirmations of {versions} versions on {REPLICAS} replicas")
    found += [f"{event.replica} did not verify {event.version}" for event in staged if not event.verified]
    found += [
        f"{event.replica} serves {event.digest}" for event in confirmed if event.digest != captured[event.version]
    ]
    found += [
        f"version {Version.unpack(sync.version).n} moved {sync.bytes / sync.full_bytes:.3%} ({sync.mode})"
        for sync in syncs[1:]
        if sync.mode != "delta" or sync.bytes > most * sync.full_bytes
    ]
    return found


def main() -> None:
    """Run, print the table, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--most", type=float, default=0.003, help="share of the full bytes that a version may move")
    parser.add_argument("settings", nargs="*", help="further key=value settings")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    reward = arguments.out.resolve() / "even_reward.py"
    reward.write_text(REWARD, encoding="utf-8")
    command = [sys.executable, "-c", "from paceline.cli.main import entry_point; entry_point()", "train"]
    subprocess.run([*command, *settings(arguments, reward)], check=True)
    logs = sorted(arguments.out.glob("runs/**/events.jsonl"), key=lambda path: path.stat().st_mtime)
    records = list(read_events(logs[-1]))
    print(table([record.event for record in records if isinstance(record.event, SyncCompleted)]))
    if found := faults(records, arguments.versions, arguments.most):
        raise SystemExit("\n".join(found))
    print(f"{arguments.versions} versions, each proved by its digest on {REPLICAS} replicas")


if __name__ == "__main__":
    main()
