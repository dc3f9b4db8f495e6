"""A run of real weights on one event loop: the shipped model, the embedded engine, deltas over an object store."""

from __future__ import annotations

import asyncio
from importlib import resources
from pathlib import Path

import pytest
import torch

from paceline.backend.torch_backend import TorchBackend
from paceline.checkpoint_engine.ray_object import RayObjectReceiver, RayObjectSender
from paceline.core.config import build_config
from paceline.core.events import SyncCaptured, SyncCompleted, SyncConfirmed, SyncStaged
from paceline.core.sample import Prompt
from paceline.engine.embedded_engine import EmbeddedEngine
from paceline.runtime.local_runtime import LocalPorts, LocalRuntime
from paceline.runtime.system import InlineWork, SystemClock
from paceline.task.arithmetic import problems
from paceline.testing.object_transport import InProcessObjects, ObjectCluster
from paceline.testing.recording import RecordingBoard, RecordingEvents, RecordingRolloutLog
from paceline.tokenizer.fast_tokenizer import FastTokenizer
from paceline.weights.digest import digest_tensors
from tests.simulation.test_local_run import Prompts

SHIPPED = str(Path(str(resources.files("paceline"))) / "assets" / "tiny_model")
VERSIONS = 5


class Problems(Prompts):
    """Additions, in their order."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        super().__init__()
        self._problems = problems("train")
        self._tokenizer = tokenizer

    def next_prompt(self) -> Prompt:
        self._next += 1
        problem = self._problems[self._next]
        return Prompt(f"p{self._next}", problem.prompt, tuple(self._tokenizer.encode(problem.prompt)), "", "arithmetic")

    def validation_prompts(self) -> list[Prompt]:
        return []


class DigitReward:
    """A signal whatever the model can do."""

    async def score(self, prompt: Prompt, response_text: str) -> float:
        return sum(letter in "02468" for letter in response_text) / max(1, len(response_text))


class ServedBoard(RecordingBoard):
    """Hashes what an engine really reads, for every version that is announced."""

    def __init__(self) -> None:
        super().__init__()
        self.hashed: list[tuple[int, str, str]] = []

    def publish(self, version, digest, manifest, served) -> None:  # type: ignore[no-untyped-def]
        self.hashed.append((version, digest, digest_tensors(served, manifest.aliases)))


def run(mode: str) -> tuple[RecordingEvents, ServedBoard, ObjectCluster]:
    torch.set_num_threads(1)
    config = build_config(
        {
            "actor": {"ppo_mini_batch_size": 4, "optim": {"lr": 1e-6, "lr_warmup_steps": 0}},
            "async_training": {"trigger_parameter_sync_step": 1},
            "rollout": {"n": 4, "total_rollout_steps": 4 * (VERSIONS - 1), "num_replicas": 2, "dtype": "bfloat16"},
            "checkpoint_engine": {"backend": "ray_object", "mode": mode},
            "trainer": {"test_freq": 0, "val_before_train": False},
        }
    )
    tokenizer, cluster = FastTokenizer(SHIPPED), ObjectCluster()
    events, board = RecordingEvents(), ServedBoard()

    def engine(index: int) -> EmbeddedEngine:
        return EmbeddedEngine(
            model_config_dir=SHIPPED,
            dtype="bfloat16",
            max_num_seqs=16,
            max_model_len=config.max_model_len,
            kv_cache="recompute",
            seed=index,
        )

    def receiver(index: int) -> RayObjectReceiver:
        node = InProcessObjects(cluster, f"node-{index}")
        return RayObjectReceiver(node, holder=f"replica-{index}", verify="full", deadline_seconds=30)

    ports = LocalPorts(
        backend=TorchBackend(model_path=SHIPPED, actor=config.actor, seed=1),
        sender=RayObjectSender(
            InProcessObjects(cluster, "home"),
            arenas=config.arenas,
            dtype="bfloat16",
            nonfinite="error",
            threads=1,
            delta=config.checkpoint_engine.mode,
        ),
        make_engine=engine,
        make_receiver=receiver,
        board=board,
        prompts=Problems(tokenizer),
        reward=DigitReward(),
        decoder=tokenizer,
        stop_token_ids=(),
        rollout_log=RecordingRolloutLog(),
        work=InlineWork(),
        clock=SystemClock(),
        events=events,
    )
    asyncio.run(LocalRuntime(config, ports, life=1).run())
    return events, board, cluster


@pytest.mark.parametrize("mode", ["auto", "delta"])
def test_at_a_small_learning_rate_versions_arrive_as_deltas_and_are_proved(mode: str) -> None:
    events, board, cluster = run(mode)
    syncs = events.of(SyncCompleted)
    assert [sync.mode for sync in syncs] == ["full"] + ["delta"] * (VERSIONS - 1)
    assert all(0 < (sync.changed_share or 0.0) < 0.02 for sync in syncs[1:])
    assert all(sync.bytes < 0.01 * sync.full_bytes for sync in syncs[1:])
    captured = {event.version: event.digest for event in events.of(SyncCaptured)}
    assert len(set(captured.values())) == VERSIONS
    assert all(event.verified for event in events.of(SyncStaged))
    assert all(captured[event.version] == event.digest for event in events.of(SyncConfirmed))
    assert len(board.hashed) == 2 * VERSIONS
    assert all(captured[version] == digest == served for version, digest, served in board.hashed)
    # Each node got the first version whole and of the others their deltas alone.
    moved = syncs[0].full_bytes + sum(sync.bytes for sync in syncs[1:])
    assert [cluster.crossed[f"node-{index}"] for index in range(2)] == [moved, moved]
