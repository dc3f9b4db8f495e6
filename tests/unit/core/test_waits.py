"""Law L2 on the virtual clock."""

from __future__ import annotations

import asyncio

import pytest

from paceline.core.errors import DeadlineExceeded
from paceline.core.events import WaitBegan, WaitEnded
from paceline.core.waits import Waits
from paceline.testing.recording import RecordingEvents
from paceline.testing.virtual_clock import VirtualClock, run_virtual


def test_a_wait_ends_at_its_deadline_and_names_the_culprit() -> None:
    events = RecordingEvents()

    async def main(clock: VirtualClock) -> None:
        waits = Waits(who="trainer", clock=clock, events=events)
        with pytest.raises(DeadlineExceeded, match="trainer waited 30 s for samples: rollouter") as caught:
            await waits.bounded(asyncio.Event().wait(), seconds=30, what="samples", culprit="rollouter")
        assert caught.value.culprit == "rollouter"
        assert clock.now() == pytest.approx(30)

    run_virtual(main)
    assert [event.what for event in events.of(WaitBegan)] == ["samples"]
    assert events.of(WaitEnded)[0].seconds == pytest.approx(30)


def test_a_short_wait_is_not_announced() -> None:
    events = RecordingEvents()

    async def main(clock: VirtualClock) -> str:
        async def answer() -> str:
            await clock.sleep(0.5)
            return "here"

        return await Waits(who="a", clock=clock, events=events).bounded(answer(), seconds=9, what="b", culprit="c")

    assert run_virtual(main) == "here"
    assert events.events == []


def test_a_timeout_of_the_callee_is_its_own() -> None:
    async def main(clock: VirtualClock) -> None:
        async def fails() -> None:
            raise TimeoutError("inner")

        with pytest.raises(TimeoutError, match="inner"):
            await Waits(who="a", clock=clock, events=RecordingEvents()).bounded(
                fails(), seconds=9, what="b", culprit="c"
            )

    run_virtual(main)


def test_a_stuck_simulation_is_an_error_not_a_hang() -> None:
    async def main(clock: VirtualClock) -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlineExceeded, match="stuck"):
        run_virtual(main)
