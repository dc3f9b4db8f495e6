"""A stop signal is never lost and never breaks what must not be broken, whenever it comes."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import time
from collections.abc import Iterator

import pytest

from paceline.core.errors import RunInterrupted
from paceline.runtime.stop_signal import NUMBERS, StopRequested, StopSignal, raise_stop_signals


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


async def for_ever() -> None:
    await asyncio.Event().wait()


async def at_once() -> int:
    return 3


def block(number: signal.Signals) -> None:
    send(number)
    time.sleep(60)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_ends_the_race(number: signal.Signals) -> None:
    async def main(stop: StopSignal) -> None:
        asyncio.get_running_loop().call_later(0.05, send, number)
        async with asyncio.timeout(60):
            await stop.race(for_ever())

    with StopSignal() as stop, pytest.raises(RunInterrupted, match=f"stopped by {number.name}") as caught:
        asyncio.run(main(stop))
    assert caught.value.signal_number == number


def test_a_signal_before_the_race_is_remembered_and_the_first_one_counts() -> None:
    with StopSignal() as stop:
        send(signal.SIGTERM)
        send(signal.SIGINT)
        with pytest.raises(RunInterrupted, match="SIGTERM"):
            asyncio.run(stop.race(for_ever()))
        send(signal.SIGINT)  # after the race nothing is broken either


def test_without_a_signal_the_result_comes_back() -> None:
    with StopSignal() as stop:
        assert asyncio.run(stop.race(at_once())) == 3


def test_an_error_of_the_work_comes_back_as_itself() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    with StopSignal() as stop, pytest.raises(ZeroDivisionError):
        asyncio.run(stop.race(fail()))


@pytest.mark.parametrize("number", NUMBERS)
def test_a_blocking_call_is_left_where_signals_raise(number: signal.Signals) -> None:
    with StopSignal() as stop, pytest.raises(StopRequested) as caught, stop.raising():
        block(number)
    assert caught.value.as_error().signal_number == number


def test_a_signal_that_came_before_raises_at_once() -> None:
    with StopSignal() as stop:
        send(signal.SIGTERM)
        with pytest.raises(StopRequested), stop.raising():
            pytest.fail("the blocking call must not begin")


def test_a_library_that_takes_the_signals_loses_them_again() -> None:
    with StopSignal() as stop:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop.install()
        send(signal.SIGTERM)
        with pytest.raises(RunInterrupted):
            asyncio.run(stop.race(for_ever()))


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_before_a_run_a_signal_raises() -> None:
    raise_stop_signals()
    with pytest.raises(StopRequested, match="15"):
        send(signal.SIGTERM)


def test_the_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(StopRequested(15).as_error()))
    assert (error.message, error.signal_number) == ("stopped by SIGTERM", 15)
