"""Case C16 on the trainer's side: whole batches, one rule for the rest."""

from __future__ import annotations

import asyncio

import pytest

from paceline.core.errors import DeadlineExceeded, ProducerFailed
from paceline.core.events import SampleDropped
from paceline.core.sample import Prompt, Sample, encode_sample
from paceline.message_queue import MessageQueue
from paceline.testing.recording import RecordingEvents
from paceline.testing.virtual_clock import VirtualClock, run_virtual
from paceline.train.batcher import Batcher

PROMPT = Prompt("p", "?", (1,), "", "t")


def sample(number: int, life: int = 1) -> bytes:
    return encode_sample(Sample(f"{life}-{number}", life, PROMPT, []))


def make(clock: VirtualClock, events: RecordingEvents) -> tuple[MessageQueue, Batcher]:
    queue = MessageQueue(
        capacity=64, producers=["rollouter"], put_timeout_seconds=60, clock=clock, events=RecordingEvents()
    )
    batcher = Batcher(queue=queue, life=1, required_samples=8, stall_seconds=60, clock=clock, events=events)
    return queue, batcher


@pytest.mark.parametrize(("put", "batches", "left"), [(3, 0, 3), (0, 0, 0), (8, 1, 0), (11, 1, 3), (16, 2, 0)])
def test_whole_batches_then_the_rest_is_dropped_and_counted(put: int, batches: int, left: int) -> None:
    events = RecordingEvents()

    async def main(clock: VirtualClock) -> None:
        queue, batcher = make(clock, events)
        await queue.put_samples([sample(number) for number in range(put)])
        await queue.finish("rollouter")
        for _ in range(batches):
            batch = await batcher.next_batch()
            assert batch is not None
            assert len(batch) == 8
        assert await batcher.next_batch() is None
        assert await batcher.next_batch() is None
        assert clock.now() < 1

    run_virtual(main)
    dropped = events.of(SampleDropped)
    assert sum(len(event.ids) for event in dropped) == left
    assert {event.reason for event in dropped} <= {"unfilled_last_batch"}


def test_a_failed_producer_fails_the_trainer() -> None:
    async def main(clock: VirtualClock) -> None:
        queue, batcher = make(clock, RecordingEvents())
        await queue.put_samples([sample(number) for number in range(5)])
        await queue.fail("rollouter", "RuntimeError: decode")
        with pytest.raises(ProducerFailed, match="decode"):
            await batcher.next_batch()

    run_virtual(main)


def test_samples_of_a_dead_life_are_dropped_by_name() -> None:
    events = RecordingEvents()

    async def main(clock: VirtualClock) -> None:
        queue, batcher = make(clock, events)
        await queue.put_samples([sample(number, life=0) for number in range(3)])
        await queue.put_samples([sample(number) for number in range(8)])
        batch = await batcher.next_batch()
        assert batch is not None
        assert {s.life for s in batch} == {1}

    run_virtual(main)
    assert [(len(event.ids), event.reason) for event in events.of(SampleDropped)] == [(3, "lost_lineage")]


def test_a_batch_takes_what_is_urgent_first_and_waits_for_it() -> None:
    async def main(clock: VirtualClock) -> None:
        queue, batcher = make(clock, RecordingEvents())
        waiting = asyncio.ensure_future(batcher.next_batch(["1-9", "1-3"]))
        await queue.put_samples([sample(number) for number in range(9)])
        await clock.sleep(5)
        assert not waiting.done()
        await queue.put_samples([sample(9)])
        batch = await waiting
        assert batch is not None
        assert [s.sample_id for s in batch] == [f"1-{number}" for number in (3, 9, 0, 1, 2, 4, 5, 6)]

    run_virtual(main)


def test_a_batch_does_not_wait_for_an_urgent_sample_that_failed_meanwhile() -> None:
    async def main(clock: VirtualClock) -> None:
        queue, batcher = make(clock, RecordingEvents())
        still = ["1-9", "1-3"]

        async def still_urgent() -> list[str]:
            return still

        waiting = asyncio.ensure_future(batcher.next_batch(["1-9", "1-3"], still_urgent=still_urgent))
        await queue.put_samples([sample(number) for number in range(9)])
        await clock.sleep(5)
        assert not waiting.done()
        still.remove("1-9")
        batch = await waiting
        assert batch is not None
        assert batch[0].sample_id == "1-3"
        assert clock.now() < 10

    run_virtual(main)


def test_no_samples_at_the_deadline_names_the_rollouter() -> None:
    async def main(clock: VirtualClock) -> None:
        _, batcher = make(clock, RecordingEvents())
        with pytest.raises(DeadlineExceeded, match="8 samples") as caught:
            await batcher.next_batch()
        assert caught.value.culprit == "rollouter"

    run_virtual(main)
