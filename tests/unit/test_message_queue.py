"""Cases C16 and C18: ends, failures, back-pressure, ledger; on the virtual clock."""

from __future__ import annotations

import asyncio

import pytest

from paceline.core.errors import DeadlineExceeded, ProducerFailed, QueueClosed, VersionError
from paceline.message_queue import MAX_VALIDATIONS, MessageQueue
from paceline.testing.recording import RecordingEvents
from paceline.testing.virtual_clock import VirtualClock, run_virtual


def make(clock: VirtualClock, capacity: int = 4, producers: tuple[str, ...] = ("rollouter",)) -> MessageQueue:
    return MessageQueue(
        capacity=capacity, producers=producers, put_timeout_seconds=60, clock=clock, events=RecordingEvents()
    )


def items(*numbers: int) -> list[bytes]:
    return [str(number).encode() for number in numbers]


async def assert_ledger(queue: MessageQueue) -> None:
    statistics = await queue.get_statistics()
    assert statistics.put == statistics.taken + sum(statistics.dropped.values()) + statistics.size


def test_the_fifth_put_waits_and_nothing_is_lost() -> None:
    async def main(clock: VirtualClock) -> None:
        queue = make(clock)
        putting = asyncio.ensure_future(queue.put_samples(items(*range(6))))
        await clock.sleep(1)
        assert not putting.done()
        assert await queue.get_queue_size() == 4
        await assert_ledger(queue)
        await queue.update_param_version(3)
        assert (await queue.get_statistics()).version == 3
        taken: list[bytes] = []
        while len(taken) < 6:
            batch, _ = await queue.get_samples(2, 1.0)
            taken += batch
            await assert_ledger(queue)
        assert taken == items(*range(6))
        await putting

    run_virtual(main)


def test_five_calls_of_two_return_ten_samples_in_order() -> None:
    async def main(clock: VirtualClock) -> None:
        queue = make(clock, capacity=10)
        await queue.put_samples(items(*range(10)))
        taken = [await queue.get_samples(2, 1.0) for _ in range(5)]
        assert [item for batch, _ in taken for item in batch] == items(*range(10))
        assert [left for _, left in taken] == [8, 6, 4, 2, 0]

    run_virtual(main)


def test_end_of_data_drains_first_and_repeats() -> None:
    async def main(clock: VirtualClock) -> None:
        queue = make(clock)
        await queue.put_samples(items(1, 2, 3))
        await queue.finish("rollouter")
        assert await queue.get_samples(8, 1.0) == (items(1, 2, 3), 0)
        for _ in range(2):
            with pytest.raises(QueueClosed, match="end of data"):
                await queue.get_samples(8, 1.0)
        assert (await queue.get_statistics()).put == 3

    run_virtual(main)


def test_the_end_wakes_a_waiting_consumer() -> None:
    async def main(clock: VirtualClock) -> None:
        queue = make(clock)
        waiting = asyncio.ensure_future(queue.get_samples(8, 100.0))
        await clock.sleep(1)
        await queue.finish("rollouter")
        with pytest.raises(QueueClosed):
            await waiting
        assert clock.now() < 2

    run_virtual(main)


def test_the_end_on_a_full_queue_neither_waits_nor_evicts() -> None:
    async def main(clock: VirtualClock) -> None:
        queue = make(clock)
        await queue.put_samples(items(1, 2, 3, 4))
        await queue.finish("rollouter")
        assert (await queue.get_samples(9, 1.0))[0] == items(1, 2, 3, 4)
        with pytest.raises(QueueClosed):
            await queue.get_samples(1, 1.0)

    run_virtual(main)


def test_a_failure_is_not_an_end_of_data() -> None:
    async def main(clock: VirtualClock) -> None:
        queue = make(clock, capacity=8)
        await queue.put_samples(items(*range(5)))
        await queue.fail("rollouter", "RuntimeError: decode")
        await queue.fail("rollouter", "a later one")
        assert len((await queue.get_samples(8, 1.0))[0]) == 5
        with pytest.raises(ProducerFailed, match="rollouter: RuntimeError: decode"):
            await queue.get_samples(8, 1.0)

    run_virtual(main)


def test_one_of_two_producers_may_end() -> None:
    async def main(clock: VirtualClock) -> None:
        queue = make(clock, producers=("a", "b"))
        await queue.finish("a")
        assert await queue.get_samples(1, 0.5) == ([], 0)
        await queue.put_sample(b"x")
        assert await queue.get_sample(0.5) == (b"x", 0)
        assert await queue.get_sample(0.5) == (None, 0)
        await queue.finish("b")
        with pytest.raises(QueueClosed):
            await queue.get_sample(0.5)

    run_virtual(main)


def test_a_blocked_put_names_the_trainer_at_its_deadline() -> None:
    async def main(clock: VirtualClock) -> None:
        queue = make(clock, capacity=1)
        with pytest.raises(DeadlineExceeded, match="room in the message queue") as caught:
            await queue.put_samples(items(1, 2))
        assert caught.value.culprit == "trainer"

    run_virtual(main)


def test_shutdown_wakes_a_blocked_put() -> None:
    async def main(clock: VirtualClock) -> None:
        queue = make(clock, capacity=1)
        putting = asyncio.ensure_future(queue.put_samples(items(1, 2)))
        await clock.sleep(1)
        await queue.shutdown()
        with pytest.raises(QueueClosed):
            await putting
        assert clock.now() < 2

    run_virtual(main)


def test_drops_are_named_and_the_version_only_rises() -> None:
    async def main(clock: VirtualClock) -> None:
        queue = make(clock)
        await queue.put_samples(items(1, 2))
        assert await queue.clear_queue("lost_lineage") == 2
        assert (await queue.get_statistics()).dropped == {"lost_lineage": 2}
        await assert_ledger(queue)
        await queue.update_param_version(5)
        with pytest.raises(VersionError, match="backwards"):
            await queue.update_param_version(4)

    run_virtual(main)


def test_validation_results_are_no_samples_and_never_wait() -> None:
    async def main(clock: VirtualClock) -> None:
        queue = make(clock, capacity=1)
        putting = asyncio.ensure_future(queue.put_samples(items(1, 2)))
        await clock.sleep(1)
        await queue.put_validate(b"v1")
        await queue.put_validate(b"v2")
        assert (await queue.get_statistics()).put == await queue.get_queue_size() == 1
        assert [await queue.get_validate() for _ in range(3)] == [b"v1", b"v2", None]
        assert not putting.done()
        assert clock.now() == 1
        await queue.shutdown()
        with pytest.raises(QueueClosed):
            await putting

    run_virtual(main)


def test_results_that_nobody_takes_do_not_pile_up() -> None:
    async def main(clock: VirtualClock) -> None:
        queue = make(clock)
        for number in range(MAX_VALIDATIONS + 3):
            await queue.put_validate(str(number).encode())
        assert await queue.get_validate() == b"3"

    run_virtual(main)


def test_nothing_waits_behind_a_blocked_put() -> None:
    """C18: statistics, versions, a look inside, the end of data, a failure and the shutdown."""

    async def main(clock: VirtualClock) -> None:
        queue = make(clock, capacity=2, producers=("a", "b"))
        putting = asyncio.ensure_future(queue.put_samples(items(*range(5))))
        await clock.sleep(1)
        assert (await queue.get_statistics()).size == 2
        await queue.update_param_version(7)
        assert await queue.peek_samples() == items(0, 1)
        await queue.finish("b")
        await queue.fail("a", "RuntimeError: decode")
        assert clock.now() == 1
        assert not putting.done()
        await queue.shutdown()
        with pytest.raises(QueueClosed):
            await putting
        assert await queue.get_samples(8, 1.0) == (items(0, 1), 0)
        await assert_ledger(queue)
        assert clock.now() == 1

    run_virtual(main)


def test_two_producers_fill_one_queue_in_turns_and_lose_nothing() -> None:
    async def main(clock: VirtualClock) -> None:
        queue = make(clock, capacity=3, producers=("a", "b"))
        putting = [asyncio.ensure_future(queue.put_samples(items(*range(start, start + 10)))) for start in (0, 10)]
        taken: list[bytes] = []
        while len(taken) < 20:
            taken += (await queue.get_samples(4, 1.0))[0]
            await assert_ledger(queue)
        await asyncio.gather(*putting)
        assert sorted(taken) == sorted(items(*range(20)))
        for start in (0, 10):  # each producer's own order is kept
            mine = [int(one) for one in taken if start <= int(one) < start + 10]
            assert mine == sorted(mine)

    run_virtual(main)
