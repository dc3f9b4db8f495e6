"""The cut: every sample once, whatever moved while it was taken; what a disk that is full costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from paceline.core.checkpoint import (
    CheckpointMeta,
    OpenGroup,
    RollouterSnapshot,
    decode_rollouter,
    encode_rollouter,
)
from paceline.core.commands import ValidationResult
from paceline.core.config import build_config
from paceline.core.errors import CheckpointError
from paceline.core.events import CheckpointFailed, CheckpointSaved
from paceline.core.sample import Prompt, Sample, encode_sample
from paceline.core.version import Lineage, Version
from paceline.message_queue import MessageQueue
from paceline.runtime.system import InlineWork
from paceline.testing.marker_model import MarkerBackend
from paceline.testing.recording import RecordingEvents
from paceline.testing.virtual_clock import VirtualClock, run_virtual
from paceline.train.checkpoint import Checkpointer, TrainerStand, merge_cut

PROMPT = Prompt("p", "?", (1,), "", "t")


def sample(number: int) -> Sample:
    return Sample(f"1-{number}", 1, PROMPT, [])


def snapshot(*, groups: list[int], ready: list[int], admitted: int) -> RollouterSnapshot:
    return RollouterSnapshot(
        life=1,
        admitted=admitted,
        failed=0,
        dropped=0,
        prompts=b"",
        groups=[OpenGroup(f"1-{number}", PROMPT, [None], [None], 0) for number in groups],
        ready=[sample(number) for number in ready],
        admitted_under={},
    )


@pytest.mark.parametrize(
    ("groups", "ready", "held", "queued", "in_flight", "on_their_way"),
    [
        ([5], [4], [1], [2, 3], ["1-5"], ["1-1", "1-2", "1-3", "1-4"]),
        ([5], [3, 4], [], [2, 3], ["1-5"], ["1-2", "1-3", "1-4"]),  # 3 was put meanwhile
        ([4, 5], [], [], [3, 4], ["1-5"], ["1-3", "1-4"]),  # 4 was finished and put meanwhile
        ([5], [], [], [4, 6], ["1-5"], ["1-4"]),  # 6 was admitted, finished and put meanwhile
        ([], [], [], [], [], []),
    ],
)
def test_every_sample_is_in_the_cut_once(
    groups: list[int],
    ready: list[int],
    held: list[int],
    queued: list[int],
    in_flight: list[str],
    on_their_way: list[str],
) -> None:
    cut = merge_cut(
        snapshot(groups=groups, ready=ready, admitted=5), [sample(number) for number in [*held, *queued]], 0
    )
    assert [group.sample_id for group in cut.groups] == in_flight
    assert [one.sample_id for one in cut.ready] == on_their_way
    assert cut.taken == 5 - len(in_flight) - len(on_their_way)


class Source:
    async def snapshot(self) -> bytes:
        return encode_rollouter(snapshot(groups=[3], ready=[2], admitted=3))

    async def outstanding_before(self, version: int, consumed: object) -> list[str]:
        return []

    async def version_captured(self, version: int, trained: int) -> None: ...

    async def samples_dropped(self, sample_ids: Sequence[str]) -> None: ...


class Store:
    """Keeps the parts, or is full."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.parts: dict[str, bytes] = {}
        self.full = False

    def begin(self) -> None:
        self.calls.append("begin")

    def save(self, step: int, write_state: Callable[[str], bool], parts: Mapping[str, bytes]) -> int:
        self.calls.append(f"save {step}")
        if self.full:
            raise CheckpointError(f"checkpoint of update {step}: No space left on device")
        self.parts = dict(parts)
        return 1000


def save(
    store: Store, *stands: TrainerStand, save_freq: int = 2, validated: Sequence[ValidationResult] = ()
) -> tuple[RecordingEvents, list[bool]]:
    events, due = RecordingEvents(), []

    async def main(clock: VirtualClock) -> None:
        queue = MessageQueue(
            capacity=8, producers=["rollouter"], put_timeout_seconds=1.0, clock=clock, events=RecordingEvents()
        )
        await queue.put_samples([encode_sample(sample(1))])
        for result in validated:
            await queue.put_validate(msgspec.msgpack.encode(result))
        checkpointer = Checkpointer(
            build_config({"trainer": {"save_freq": save_freq}}),
            run_id="r",
            lineage=Lineage(1),
            store=store,
            backend=MarkerBackend(),
            source=Source(),
            queue=queue,
            work=InlineWork(),
            clock=clock,
            events=events,
        )
        for stand in stands:
            due.append(checkpointer.is_due(stand.step))
            await checkpointer.save(stand, lambda: Version(1, 4).packed, [])
        assert await queue.get_queue_size() == 1

    run_virtual(main)
    return events, due


def test_a_checkpoint_says_what_it_is_of(tmp_path: Path) -> None:
    store = Store()
    events, _ = save(store, TrainerStand(9, 1))
    meta = msgspec.json.decode(store.parts["meta.json"], type=CheckpointMeta)
    assert (meta.step, meta.updates_since_sync, meta.version) == (9, 1, Version(1, 4).packed)
    assert meta.open_ids == ["1-3", "1-1", "1-2"]
    assert meta.lineage_of(2, []) == Lineage(2, 4, {1: 4})
    cut = decode_rollouter(store.parts["rollouter.msgpack"])
    assert cut.window_taken == build_config({}).required_samples
    (saved,) = events.of(CheckpointSaved)
    assert (saved.step, saved.bytes, saved.open_samples, saved.pause_seconds) == (9, 1000, 3, 0.0)


def test_a_checkpoint_has_the_newest_validation_result_that_lay_beside_the_samples() -> None:
    store = Store()
    results = [ValidationResult(Version(1, n).packed, 2 * n, n / 10, 100) for n in (1, 3, 2)]
    save(store, TrainerStand(9, 1), validated=results)
    assert msgspec.json.decode(store.parts["meta.json"], type=CheckpointMeta).validation == results[1]
    save(store, TrainerStand(9, 1))
    assert msgspec.json.decode(store.parts["meta.json"], type=CheckpointMeta).validation is None


def test_a_full_disk_costs_one_checkpoint_which_stays_due() -> None:
    store = Store()
    store.full = True
    events, due = save(store, TrainerStand(2, 0), TrainerStand(3, 0))
    assert [(event.step, event.error) for event in events.of(CheckpointFailed)] == [
        (2, "checkpoint of update 2: No space left on device"),
        (3, "checkpoint of update 3: No space left on device"),
    ]
    assert due == [True, True]
    assert events.of(CheckpointSaved) == []


def test_an_update_is_saved_once() -> None:
    store = Store()
    _, due = save(store, TrainerStand(2, 0), TrainerStand(2, 0), TrainerStand(3, 0), TrainerStand(0, 0))
    assert store.calls == ["begin", "save 2", "begin", "save 3", "begin", "save 0"]
    assert due == [True, False, False, False]
