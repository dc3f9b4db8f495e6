"""Time between tokens while weights are swapped, beside the same without syncs, in paired windows.

    python -m benchmarks.inter_token [--places 64] [--window 5] [--pairs 6] [--every 1] [--json FILE]

One replica (the production `Replica`, `WeightTransaction` and embedded engine) decodes the shipped model without end; a
trainer's process publishes another version every second through the shared-memory engine, in every other window. The
replica stages and swaps it as in a run. Each step gives every running sequence one token, so the time between two ends
of steps is the time between two tokens of a sequence. Reported for `kv_cache` `keep` and `recompute`: quantiles of it
in the windows with and without syncs, the gap with the swap in it, and engine loops without tokens per sync.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import torch

from paceline.checkpoint_engine.shared_memory import SharedMemoryReceiver, SharedMemorySender
from paceline.core.commands import ExchangeRequest, StageCommand, SwapCommand
from paceline.core.config import build_config
from paceline.core.manifest import WeightManifest
from paceline.core.ports import InferenceEngine
from paceline.core.sample import Completion, GenerationRequest, SamplingParams
from paceline.core.version import Version
from paceline.engine.embedded_engine import EmbeddedEngine
from paceline.rollout.replica import Replica
from paceline.runtime import registry
from paceline.runtime.collector import settle_collector
from paceline.runtime.system import SystemClock, ThreadWork
from paceline.sync.weight_transaction import WeightTransaction
from paceline.testing.fake_fleet import SilentEvents
from paceline.testing.recording import RecordingBoard

KvCache = Literal["keep", "recompute"]
PROMPT = list(range(4, 16))
TOKENS = 128
DEADLINE_SECONDS = 60.0
WARM_UP_SECONDS = 2.0


def publish_on_request(connection: Connection, model_path: str, directory: str) -> None:
    """The trainer's process: changes its weights a little and publishes them whenever it is asked to."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    sender = SharedMemorySender(directory=directory, arenas=3, dtype="float32")
    while (version := connection.recv_bytes()) != b"":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + 1e-4)
        sender.capture(model.state_dict().items(), int(version))
        connection.send_bytes(msgspec.msgpack.encode(sender.publish().manifest))
    sender.close()


class ObservedEngine:
    """An engine that keeps when its steps ended and how many tokens each made."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self.steps: list[tuple[float, int]] = []
        self.binds: list[float] = []

    def step(self) -> list[Completion]:
        """See `InferenceEngine`."""
        finished = self._engine.step()
        made = self._engine.last_step
        self.steps.append((time.perf_counter(), 0 if made is None else len(made.token_ids)))
        return finished

    def bind(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """See `InferenceEngine`."""
        self._engine.bind(tensors, version)
        self.binds.append(time.perf_counter())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@dataclass(frozen=True)
class Figures:
    """Milliseconds; per sync the gap that holds the swap, and loops of the engine that made no token."""

    kv_cache: KvCache
    syncs: int
    without: dict[str, float]
    with_syncs: dict[str, float]
    swap_gap: dict[str, float]
    idle_loops_per_sync: int
    gap_in_steps: dict[str, float]


class Scene:
    """A replica that never runs out of requests, and its trainer's process."""

    def __init__(self, kv_cache: KvCache, places: int, directory: str) -> None:
        config = build_config({})
        model_path = str(registry.model_path(config))
        self._places = places
        self._clock = SystemClock()
        self.engine = ObservedEngine(
            EmbeddedEngine(
                model_config_dir=model_path,
                dtype="float32",
                max_num_seqs=places,
                max_model_len=len(PROMPT) + TOKENS,
                kv_cache=kv_cache,
            )
        )
        self.replica = Replica(
            replica_id="replica-0",
            make_engine=lambda: cast("InferenceEngine", self.engine),
            transaction=WeightTransaction(
                replica_id="replica-0",
                life=1,
                receiver=SharedMemoryReceiver(holder="replica-0"),
                board=RecordingBoard(),
                clock=self._clock,
            ),
            partial_rollout=True,
            drain_seconds=DEADLINE_SECONDS,
            decode_work=ThreadWork("decode"),
            stage_work=ThreadWork("stage"),
            clock=self._clock,
            events=SilentEvents(),
        )
        context = get_context("spawn")
        self._trainer, theirs = context.Pipe()
        self._process = context.Process(target=publish_on_request, args=(theirs, model_path, directory), daemon=True)
        self._process.start()
        self._next = 0

    async def sync(self) -> None:
        """One version from the trainer's process into the replica."""
        version = Version(1, self._next).packed
        self._next += 1
        self._trainer.send_bytes(str(version).encode())
        answer = await asyncio.to_thread(self._trainer.recv_bytes)
        manifest = msgspec.msgpack.decode(answer, type=WeightManifest)
        deadline = self._clock.wall() + DEADLINE_SECONDS
        await self.replica.stage(StageCommand(manifest=manifest, sync_id=0, deadline_wall=deadline))
        await self.replica.swap(SwapCommand(version=version, sync_id=0, deadline_wall=deadline))

    async def keep_busy(self) -> None:
        """Twice as many requests as there are places, of lengths that do not end together."""
        acknowledged, sent, owed = 0, 0, 0
        while True:
            fresh = []
            while owed + len(fresh) < 2 * self._places:
                length = TOKENS // 2 + sent % (TOKENS // 2)
                params = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=length, stop_token_ids=())
                fresh.append(GenerationRequest(request_id=f"r{sent}", prompt_ids=PROMPT, params=params))
                sent += 1
            owed += len(fresh)
            reply = await self.replica.exchange(ExchangeRequest(fresh, acknowledged, 0.05))
            owed -= reply.batch - acknowledged
            acknowledged = reply.batch

    def end(self) -> None:
        """End the trainer's process."""
        self._trainer.send_bytes(b"")
        self._process.join(10)


async def windows(scene: Scene, seconds: float, pairs: int, every: float) -> list[tuple[float, float]]:
    """Let time pass: a window with syncs, one without, and so on; begin and end of those with syncs."""
    with_syncs: list[tuple[float, float]] = []
    await asyncio.sleep(WARM_UP_SECONDS)
    for _ in range(pairs):
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            due = time.perf_counter() + every
            await scene.sync()
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        with_syncs.append((began, time.perf_counter()))
        await asyncio.sleep(seconds)
    return with_syncs


async def measure(kv_cache: KvCache, options: argparse.Namespace, directory: str) -> Figures:
    """One engine through all windows."""
    scene = Scene(kv_cache, options.places, directory)
    running = asyncio.ensure_future(scene.replica.run())
    await scene.sync()
    await scene.sync()
    busy = asyncio.ensure_future(scene.keep_busy())
    settle_collector()
    began = time.perf_counter() + WARM_UP_SECONDS
    with_syncs = await windows(scene, options.window, options.pairs, options.every)
    busy.cancel()
    await scene.replica.close()
    await asyncio.gather(running, busy, return_exceptions=True)
    scene.end()
    return figures(kv_cache, scene.engine, began, with_syncs)


def figures(
    kv_cache: KvCache, engine: ObservedEngine, began: float, with_syncs: Sequence[tuple[float, float]]
) -> Figures:
    """Gaps between the ends of steps that made tokens, by the window that they end in."""
    made = [at for at, tokens in engine.steps if tokens and at > began]
    gaps = list(pairwise(made))
    inside = [(a, b) for a, b in gaps if any(begin <= a and b <= end for begin, end in with_syncs)]
    outside = [(a, b) for a, b in gaps if all(b < begin or a > end for begin, end in with_syncs)]
    binds = [at for at in engine.binds if at > began]
    around = [b - a for bind in binds for a, b in inside if a <= bind <= b]
    idle = [
        sum(not tokens and a <= at <= b for at, tokens in engine.steps)
        for bind in binds
        for a, b in inside
        if a <= bind <= b
    ]
    step = statistics.median(b - a for a, b in outside)
    return Figures(
        kv_cache=kv_cache,
        syncs=len(binds),
        without=quantiles([b - a for a, b in outside]),
        with_syncs=quantiles([b - a for a, b in inside]),
        swap_gap=quantiles(around),
        idle_loops_per_sync=max(idle, default=0),
        gap_in_steps=quantiles([gap / step / 1e3 for gap in around]),
    )


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """In milliseconds."""
    ordered = sorted(seconds)
    at = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in SHARES.items()}
    return {name: round(value * 1e3, 3) for name, value in at.items()}


SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def show(found: Figures) -> str:
    """Lines of a Markdown table."""
    rows = [
        (f"{found.kv_cache}, without syncs", found.without),
        (f"{found.kv_cache}, a sync a second", found.with_syncs),
        (f"{found.kv_cache}, the gap with the swap", found.swap_gap),
    ]
    lines = [f"| {name} | " + " | ".join(f"{row[key]:.2f}" for key in SHARES) + " |" for name, row in rows]
    loops = ", ".join(f"{key} {value:.2f}" for key, value in found.gap_in_steps.items())
    return (
        "\n".join(lines)
        + f"\n{found.syncs} syncs, loops without tokens per sync: {found.idle_loops_per_sync}; gap in steps: {loops}\n"
    )


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", type=int, default=64)
    parser.add_argument("--window", type=float, default=5.0, help="seconds of a window")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between syncs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: list[Figures] = []
    sys.stdout.write("| time between tokens, ms | p50 | p90 | p99 | max |\n|---|---|---|---|---|\n")
    for kv_cache in ("keep", "recompute"):
        with tempfile.TemporaryDirectory(prefix="it-") as directory:
            found.append(asyncio.run(measure(cast("KvCache", kv_cache), options, directory)))
        sys.stdout.write(show(found[-1]))
        sys.stdout.flush()
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=2), encoding="utf-8")
    return int(any(one.idle_loops_per_sync > 1 for one in found))


if __name__ == "__main__":
    sys.exit(main())
