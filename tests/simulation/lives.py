"""Lives of one run on the virtual clock: production loops, marker model, checkpoints and journals in a directory.

A life ends by itself, or is killed at a moment of virtual time: its loop is dropped in the middle of whatever it does,
as `kill -9` would. The next one begins from what lies on the disk, as the processes of a run do.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from paceline.checkpoint_engine.in_process import InProcessExchange, InProcessReceiver, InProcessSender
from paceline.core.checkpoint_ports import CheckpointStore
from paceline.core.config import Config, build_config
from paceline.core.errors import RunInterrupted
from paceline.core.events import Event, RunResumed, RunStarted
from paceline.core.ports import RolloutLog
from paceline.core.sample import Prompt, Sample
from paceline.observability.ledger import Ledger
from paceline.observability.lives import split_lives
from paceline.observability.reader import Record
from paceline.rollout.prompt_dataset import DatasetCursor, PromptDataset
from paceline.runtime.local_runtime import LocalPorts, LocalResume, LocalRuntime
from paceline.runtime.resume import load_meta, load_resumption
from paceline.store.checkpoint_directory import CheckpointDirectory, newest_checkpoint
from paceline.store.token_journal import FileJournal
from paceline.testing.marker_model import MarkerBackend, MarkerEngine
from paceline.testing.recording import RecordingBoard, RecordingEvents, RecordingRolloutLog
from paceline.testing.virtual_clock import VirtualClock, run_virtual
from paceline.train.checkpoint import TrainerStand

T = TypeVar("T")


class SlowWork:
    """Work that takes virtual time, so that a kill can come in the middle of anything. For each save, `during_saves`
    has the tokens that were generated while the files were written.
    """

    def __init__(self, clock: VirtualClock, run: Run) -> None:
        self._clock = clock
        self._run = run

    async def run(self, job: Callable[[], T]) -> T:
        if not job.__qualname__.startswith("Checkpointer.save"):
            await self._clock.sleep(self._run.work_seconds)
            return job()
        before = self._run.tokens_generated
        await self._clock.sleep(self._run.save_seconds)
        self._run.during_saves.append(self._run.tokens_generated - before)
        return job()


class LengthReward:
    async def score(self, prompt: Prompt, response_text: str) -> float:
        return float(len(response_text) % 3)


class CharDecoder:
    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(str(token) for token in token_ids)


@dataclass
class Run:
    """A run of several lives in `directory`."""

    directory: Path
    settings: dict[str, Any]
    prompts: int = 12
    work_seconds: float = 0.01
    save_seconds: float = 0.01
    during_saves: list[int] = field(default_factory=list)
    engines: list[MarkerEngine] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    trained: list[tuple[Sample, int, int]] = field(default_factory=list)  # sample, captured version, life
    backend: MarkerBackend = field(default_factory=MarkerBackend)
    life: int = 0
    runtime: LocalRuntime | None = None

    @property
    def config(self) -> Config:
        return build_config(self.settings)

    @property
    def tokens_generated(self) -> int:
        """Of all engines of all lives."""
        return sum(engine.tokens_generated for engine in self.engines)

    @property
    def ledger(self) -> Ledger:
        return Ledger(split_lives(Record(0.0, "", 0, event) for event in self.events))  # type: ignore[arg-type]

    def live(self, *, kill_at: float | None = None, preempt_at: float | None = None) -> None:
        """One life, to its end or to its death."""
        self.life += 1
        run_virtual(lambda clock: self._main(clock, kill_at, preempt_at))

    async def _main(self, clock: VirtualClock, kill_at: float | None, preempt_at: float | None) -> None:
        config, log, sink = self.config, RecordingRolloutLog(), RecordingEvents()
        prompts = self._prompts()
        self.backend = MarkerBackend()
        resume = self._resume(prompts)
        if resume is None:  # a run without a checkpoint is not gone on with: another one begins in its place
            shutil.rmtree(self.directory / "journal", ignore_errors=True)
            self.events.clear()
            self.trained.clear()
            self.life = 1
        self.events.append(_started(self.life))
        if resume is not None:
            self.events.append(resume[1])
        self.runtime = self._build(config, clock, log, sink, prompts, None if resume is None else resume[0])
        running = asyncio.ensure_future(self.runtime.run())
        if preempt_at is not None:
            await clock.sleep(preempt_at)
            await self.runtime.trainer.preempt()
        try:
            async with asyncio.timeout(kill_at):
                await asyncio.shield(running)
        except (TimeoutError, RunInterrupted):
            pass  # killed or preempted; what it has left on the disk is all that is left
        finally:
            self.events.extend(sink.events)
            self.trained.extend((sample, version, self.life) for sample, version, _ in log.records)
            await _destroy(running)

    def _prompts(self) -> PromptDataset:
        train = [Prompt(f"p{i}", "?", (i + 1, 2, 3, 4), "", "marker") for i in range(self.prompts)]
        validation = [Prompt(f"v{i}", "?", (1, 2, 3, 4), "", "marker") for i in range(2)]
        return PromptDataset(train=train, validation=validation, seed=self.config.data.seed)

    def _resume(self, prompts: PromptDataset) -> tuple[LocalResume, RunResumed] | None:
        checkpoint, refused = newest_checkpoint(self.directory / "checkpoints")
        if checkpoint is None:
            return None
        meta = load_meta(checkpoint)
        siblings = [
            life.number
            for life in split_lives(Record(0.0, "", 0, event) for event in self.events)  # type: ignore[arg-type]
            if life.resumed is not None and (life.resumed.from_life, life.resumed.step) == (meta.life, meta.step)
        ]
        lineage = meta.lineage_of(self.life, siblings)
        resumption = load_resumption(self.config, checkpoint, self.directory / "journal", lineage)
        prompts.restore(msgspec.msgpack.decode(resumption.snapshot.prompts, type=DatasetCursor))
        self.backend.load_state(str(checkpoint))
        event = RunResumed(
            from_life=meta.life,
            step=meta.step,
            version=meta.version,
            admitted=meta.admitted,
            restored=meta.open_ids,
            refused=refused,
        )
        return LocalResume(
            resumption=resumption, lineage=lineage, stand=TrainerStand(meta.step, meta.updates_since_sync)
        ), event

    def _engine(self, config: Config) -> MarkerEngine:
        self.engines.append(MarkerEngine(places=config.rollout.max_num_seqs))
        return self.engines[-1]

    def _build(
        self,
        config: Config,
        clock: VirtualClock,
        log: RolloutLog,
        sink: RecordingEvents,
        prompts: PromptDataset,
        resume: LocalResume | None,
    ) -> LocalRuntime:
        exchange = InProcessExchange()
        store: CheckpointStore = CheckpointDirectory(
            self.directory / "checkpoints",
            life=self.life,
            keep=config.trainer.max_ckpt_to_keep,
            journal=self.directory / "journal",
        )
        ports = LocalPorts(
            backend=self.backend,
            sender=InProcessSender(exchange, arenas=config.arenas, dtype=None, nonfinite="error"),
            make_engine=lambda index: self._engine(config),
            make_receiver=lambda index: InProcessReceiver(exchange, holder=f"replica-{index}", verify="full"),
            board=RecordingBoard(),
            prompts=prompts,
            reward=LengthReward(),
            decoder=CharDecoder(),
            stop_token_ids=(),
            rollout_log=log,
            work=SlowWork(clock, self),
            clock=clock,
            events=sink,
            store=store,
            make_journal=lambda index: FileJournal(self.directory / "journal", f"replica-{index}", self.life),
        )
        return LocalRuntime(config, ports, life=self.life, resume=resume)


def _started(life: int) -> RunStarted:
    return RunStarted(run_id="r", life=life, seed=0, cores=1, threads={}, command_wall=0.0, total_steps=0)


async def _destroy(running: asyncio.Future[None]) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
