"""Five versions of the production loops on one event loop, marker model, virtual clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from paceline.checkpoint_engine.in_process import InProcessExchange, InProcessReceiver, InProcessSender
from paceline.core.config import build_config
from paceline.core.events import (
    SampleAdmitted,
    SampleDropped,
    SampleTrained,
    SyncCompleted,
    SyncConfirmed,
    TrainStep,
    ValidationFinished,
)
from paceline.core.sample import Prompt
from paceline.core.version import Version
from paceline.runtime.local_runtime import LocalPorts, LocalRuntime
from paceline.runtime.system import InlineWork
from paceline.testing.marker_model import MarkerBackend, MarkerEngine, marker_of
from paceline.testing.recording import RecordingBoard, RecordingEvents, RecordingRolloutLog
from paceline.testing.virtual_clock import VirtualClock, run_virtual


class Cursor(msgspec.Struct):
    given: int


class Prompts:
    """Endless prompts; four for validation."""

    def __init__(self) -> None:
        self._next = 0

    def next_prompt(self) -> Prompt:
        self._next += 1
        return Prompt(f"p{self._next}", "?", (1, 2, 3, 4), "", "marker")

    def validation_prompts(self) -> Sequence[Prompt]:
        return [Prompt(f"v{i}", "?", (1, 2, 3, 4), "", "marker") for i in range(4)]

    def state(self) -> msgspec.Struct:
        return Cursor(self._next)


class LengthReward:
    async def score(self, prompt: Prompt, response_text: str) -> float:
        return float(len(response_text) % 3)


class CharDecoder:
    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(str(token) for token in token_ids)


def run_local(
    threshold: float, trigger: int, steps: int, **async_training: object
) -> tuple[RecordingEvents, RecordingRolloutLog, MarkerBackend, RecordingBoard]:
    config = build_config(
        {
            "actor": {"ppo_mini_batch_size": 4},
            "async_training": {
                "staleness_threshold": threshold,
                "trigger_parameter_sync_step": trigger,
                **async_training,
            },
            "rollout": {"n": 2, "total_rollout_steps": 4 * steps, "max_num_seqs": 4},
            "trainer": {"test_freq": 2},
            "data": {"max_response_length": 5},
        }
    )
    events, log, backend, board = RecordingEvents(), RecordingRolloutLog(), MarkerBackend(), RecordingBoard()
    exchange = InProcessExchange()
    sender = InProcessSender(exchange, arenas=config.arenas, dtype=None, nonfinite="error")

    async def main(clock: VirtualClock) -> None:
        ports = LocalPorts(
            backend=backend,
            sender=sender,
            make_engine=lambda index: MarkerEngine(places=4),
            make_receiver=lambda index: InProcessReceiver(exchange, holder=f"replica-{index}", verify="full"),
            board=board,
            prompts=Prompts(),
            reward=LengthReward(),
            decoder=CharDecoder(),
            stop_token_ids=(),
            rollout_log=log,
            work=InlineWork(),
            clock=clock,
            events=events,
        )
        await LocalRuntime(config, ports, life=1).run()

    run_virtual(main)
    return events, log, backend, board


def test_five_versions_of_the_production_loops() -> None:
    events, log, backend, board = run_local(threshold=0.5, trigger=2, steps=10)
    assert [Version.unpack(e.version).n for e in events.of(SyncCompleted)] == [0, 1, 2, 3, 4, 5]
    assert all(e.verified for e in events.of(SyncCompleted))
    assert len(events.of(TrainStep)) == 10 == len(backend.batches)
    confirmed = Counter(e.replica for e in events.of(SyncConfirmed))
    assert confirmed == {"replica-0": 6, "replica-1": 6}
    assert len(board.published) == 12
    validated = [Version.unpack(e.version).n for e in events.of(ValidationFinished)]
    assert validated == [0, 2, 4, 5]
    admitted = [i for e in events.of(SampleAdmitted) for i in e.ids]
    trained = [i for e in events.of(SampleTrained) for i in e.ids]
    assert sorted(admitted) == sorted(trained)
    assert len(set(trained)) == 40
    assert len(log.records) == 40


def test_every_label_is_the_version_that_made_the_token() -> None:
    _, log, _, _ = run_local(threshold=0.5, trigger=2, steps=10)
    for sample, _, _ in log.records:
        for response in sample.responses:
            assert len(response.token_ids) == len(response.logprobs) == len(response.versions) == 5
            for token, version in zip(response.token_ids, response.versions, strict=True):
                assert marker_of(token) == 2 * Version.unpack(version).n


def test_threshold_zero_is_strictly_on_policy() -> None:
    events, log, _, _ = run_local(threshold=0.0, trigger=1, steps=6)
    assert all(set(e.lags) == {0} for e in events.of(SampleTrained))
    for sample, version, _ in log.records:
        for response in sample.responses:
            assert {marker_of(token) for token in response.token_ids} == {Version.unpack(version).n}


def longest_lag(events: RecordingEvents) -> int:
    return max(lag for event in events.of(SampleTrained) for lag in event.lags)


def test_without_a_bound_the_lag_has_a_tail() -> None:
    events, _, _, _ = run_local(threshold=3.0, trigger=1, steps=20)
    assert longest_lag(events) > 1


def test_wait_never_trains_a_token_over_the_bound_and_drops_nothing() -> None:
    events, log, _, _ = run_local(threshold=3.0, trigger=1, steps=20, max_version_lag=1)
    assert longest_lag(events) <= 1
    assert events.of(SampleDropped) == []
    assert len(log.records) == 80


def test_mask_takes_exactly_the_old_tokens_out_of_the_loss() -> None:
    _, log, backend, _ = run_local(threshold=3.0, trigger=1, steps=20, max_version_lag=1, max_version_lag_policy="mask")
    responses = [(r, Version.unpack(captured).n) for sample, captured, _ in log.records for r in sample.responses]
    sequences = [sequence for batch in backend.batches for sequence in batch.sequences]
    assert len(sequences) == len(responses)
    for sequence, (response, captured) in zip(sequences, responses, strict=True):
        assert sequence.loss_mask == [int(captured - Version.unpack(v).n <= 1) for v in response.versions]
    assert any(0 in sequence.loss_mask for sequence in sequences)


def test_drop_counts_what_it_drops_by_length_and_makes_others() -> None:
    events, log, _, _ = run_local(threshold=3.0, trigger=1, steps=20, max_version_lag=1, max_version_lag_policy="drop")
    assert longest_lag(events) <= 1
    assert len(events.of(TrainStep)) == 20
    assert len(log.records) == 80
    dropped = events.of(SampleDropped)
    assert {event.reason for event in dropped} == {"max_version_lag"}
    assert sum(event.lengths[5] for event in dropped) == 2 * sum(len(event.ids) for event in dropped) > 0
