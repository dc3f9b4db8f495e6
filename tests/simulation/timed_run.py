"""A whole run of the production loops in which work takes virtual time, so that trainer and replicas can be the slower
side; responses may be of any length. Records carry the time of their events.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from paceline.checkpoint_engine.in_process import InProcessExchange, InProcessReceiver, InProcessSender
from paceline.core.events import Event, SampleTrained
from paceline.core.sample import GenerationRequest, Sample
from paceline.core.version import Version
from paceline.observability.reader import Record
from paceline.runtime.local_runtime import LocalPorts, LocalRuntime
from paceline.testing.marker_model import MarkerBackend, MarkerEngine
from paceline.testing.marker_task import EndlessPrompts, LengthReward, NumberDecoder
from paceline.testing.recording import RecordingBoard, RecordingRolloutLog
from paceline.testing.virtual_clock import VirtualClock, run_virtual
from tests.unit.config_keys.keys import config_with

T = TypeVar("T")


class RaggedEngine(MarkerEngine):
    """Ends each response at a length of its own, which follows from its request alone: most are short, a few long."""

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        super().add([self._cut(one) for one in requests])

    @staticmethod
    def _cut(one: GenerationRequest) -> GenerationRequest:
        draw = random.Random(one.request_id.partition("~")[0]).paretovariate(1.0)
        length = min(one.params.max_tokens, 2 + int(2 * draw))
        return msgspec.structs.replace(one, params=msgspec.structs.replace(one.params, max_tokens=length))


@dataclass(frozen=True)
class Seconds:
    """How long work takes. `push` is that of a sync, capture included."""

    update: float
    decode: float
    push: float = 0.0


class TimedWork:
    def __init__(self, clock: VirtualClock, seconds: Seconds) -> None:
        self._clock = clock
        self._seconds = seconds

    async def run(self, job: Callable[[], T]) -> T:
        name = job.__qualname__
        if name.startswith("FullyAsyncTrainer._update"):
            seconds = self._seconds.update
        elif "decode" in name or "_step" in name:
            seconds = self._seconds.decode
        elif "capture" in name or "stage" in name:
            seconds = self._seconds.push / 2
        else:
            seconds = 0.0
        await self._clock.sleep(seconds)
        return job()


@dataclass
class TimedRun:
    """What a run did."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    records: list[Record] = field(default_factory=list)
    log: RecordingRolloutLog = field(default_factory=RecordingRolloutLog)
    seconds: float = 0.0

    def emit(self, event: Event) -> None:
        self.records.append(Record(self.clock.now(), "all", len(self.records), event))  # type: ignore[arg-type]

    @property
    def step_of(self) -> dict[str, int]:
        """Sample id -> the update that trained it."""
        trained = [record.event for record in self.records if isinstance(record.event, SampleTrained)]
        return {one: event.step for event in trained for one in event.ids}

    def samples(self) -> list[tuple[int, Sample]]:
        """Trained samples with their update."""
        return [(self.step_of[sample.sample_id], sample) for sample, _, fate in self.log.records if fate == "trained"]


def run_timed(settings: Mapping[str, object], seconds: Seconds, make_engine: Callable[[int], MarkerEngine]) -> TimedRun:
    """Train to the end. `make_engine` is given the places."""
    config = config_with({"trainer.test_freq": 0, "trainer.val_before_train": False, "rollout.n": 2, **settings})
    run, exchange = TimedRun(), InProcessExchange()

    async def main(clock: VirtualClock) -> None:
        ports = LocalPorts(
            backend=MarkerBackend(),
            sender=InProcessSender(exchange, arenas=config.arenas, dtype=None, nonfinite="error"),
            make_engine=lambda index: make_engine(config.rollout.max_num_seqs),
            make_receiver=lambda index: InProcessReceiver(exchange, holder=f"replica-{index}", verify="full"),
            board=RecordingBoard(),
            prompts=EndlessPrompts(),
            reward=LengthReward(),
            decoder=NumberDecoder(),
            stop_token_ids=(),
            rollout_log=run.log,
            work=TimedWork(clock, seconds),
            clock=clock,
            events=run,
        )
        await LocalRuntime(config, ports, life=1).run()
        run.seconds = clock.now()

    run_virtual(main)
    return run


def versions_of(sample: Sample) -> set[int]:
    """n of the versions that made its tokens."""
    return {Version.unpack(version).n for response in sample.responses for version in response.versions}
