"""A whole run of the production loops on the marker model, from dotted settings; on the virtual clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from paceline.checkpoint_engine.in_process import InProcessExchange, InProcessReceiver, InProcessSender
from paceline.core.events import SampleTrained, SyncCompleted, ValidationFinished
from paceline.core.ports import RewardFn
from paceline.core.sample import GenerationRequest, Prompt, SamplingParams, TrainSequence
from paceline.core.version import Version
from paceline.runtime.local_runtime import LocalPorts, LocalRuntime
from paceline.runtime.system import InlineWork
from paceline.testing.marker_model import MarkerBackend, MarkerEngine
from paceline.testing.recording import RecordingBoard, RecordingEvents, RecordingRolloutLog
from paceline.testing.virtual_clock import VirtualClock, run_virtual
from tests.unit.config_keys.keys import config_with

SMALL: dict[str, object] = {
    "actor.ppo_mini_batch_size": 4,
    "async_training.trigger_parameter_sync_step": 1,
    "rollout.n": 2,
    "rollout.total_rollout_steps": 32,
    "rollout.max_num_seqs": 4,
    "data.max_response_length": 5,
    "trainer.test_freq": 2,
}


class Cursor(msgspec.Struct):
    given: int


class Prompts:
    """Endless prompts; four for validation."""

    def __init__(self) -> None:
        self._given = 0

    def next_prompt(self) -> Prompt:
        self._given += 1
        return Prompt(f"p{self._given}", "?", (1, 2, 3, 4), "", "marker")

    def validation_prompts(self) -> Sequence[Prompt]:
        return [Prompt(f"v{i}", "?", (1, 2, 3, 4), "", "marker") for i in range(4)]

    def state(self) -> msgspec.Struct:
        return Cursor(self._given)


class CountingReward:
    """One of three responses to a prompt gets 1, the others 0: of pairs most have unequal rewards, some have not."""

    def __init__(self) -> None:
        self._scored: Counter[str] = Counter()

    async def score(self, prompt: Prompt, response_text: str) -> float:
        self._scored[prompt.prompt_id] += 1
        return float((self._scored[prompt.prompt_id] + int(prompt.prompt_id[1:])) % 3 == 1)


class Words:
    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(str(token) for token in token_ids)


class ListeningEngine(MarkerEngine):
    """Keeps what it is asked for."""

    def __init__(self, places: int, heard: list[GenerationRequest]) -> None:
        super().__init__(places=places)
        self._heard = heard

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        self._heard.extend(requests)
        super().add(requests)


@dataclass
class MarkerRun:
    """What a run did."""

    events: RecordingEvents
    log: RecordingRolloutLog
    backend: MarkerBackend
    requests: list[GenerationRequest]

    @property
    def published(self) -> list[int]:
        """n of the versions, in order."""
        return [Version.unpack(event.version).n for event in self.events.of(SyncCompleted)]

    @property
    def validated(self) -> list[int]:
        """n of the validated versions."""
        return [Version.unpack(event.version).n for event in self.events.of(ValidationFinished)]

    @property
    def lags(self) -> set[int]:
        """Version lags of trained tokens."""
        return {lag for event in self.events.of(SampleTrained) for lag in event.lags}

    @property
    def sampling(self) -> SamplingParams:
        """How training rollouts were asked for."""
        return next(request.params for request in self.requests if request.pinned_version is None)

    @property
    def sequences(self) -> list[TrainSequence]:
        """All that was trained."""
        return [sequence for batch in self.backend.batches for sequence in batch.sequences]


def run_marked(
    settings: Mapping[str, object],
    *,
    reward: RewardFn | None = None,
    backend: MarkerBackend | None = None,
    make_engine: Callable[[], MarkerEngine] | None = None,
) -> MarkerRun:
    """Train to the end with SMALL and these settings."""
    config = config_with({**SMALL, **settings})
    run = MarkerRun(RecordingEvents(), RecordingRolloutLog(), backend or MarkerBackend(), [])
    exchange = InProcessExchange()
    engine = config.checkpoint_engine
    scorer = reward or CountingReward()

    def listening() -> MarkerEngine:
        return ListeningEngine(config.rollout.max_num_seqs, run.requests)

    async def main(clock: VirtualClock) -> None:
        ports = LocalPorts(
            backend=run.backend,
            sender=InProcessSender(exchange, arenas=config.arenas, dtype=None, nonfinite=engine.guard),
            make_engine=lambda index: make_engine() if make_engine else listening(),
            make_receiver=lambda index: InProcessReceiver(exchange, holder=f"replica-{index}", verify="full"),
            board=RecordingBoard(),
            prompts=Prompts(),
            reward=scorer,
            decoder=Words(),
            stop_token_ids=(),
            rollout_log=run.log,
            work=InlineWork(),
            clock=clock,
            events=run.events,
        )
        await LocalRuntime(config, ports, life=1).run()

    run_virtual(main)
    return run
