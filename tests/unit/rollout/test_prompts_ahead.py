"""Prompts made ahead: the source's order and place, and a slow source that holds nobody up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import pytest

from paceline.core.errors import ConfigError, PromptError
from paceline.core.events import PromptRefused
from paceline.core.sample import Prompt
from paceline.rollout.prompts_ahead import AHEAD, PromptsAhead
from paceline.rollout.usable_prompts import MOST_REFUSED_IN_A_ROW, UsablePrompts
from paceline.runtime.system import InlineWork, SystemClock, ThreadWork
from paceline.testing.recording import RecordingEvents


class Cursor(msgspec.Struct):
    given: int


class Numbers:
    """Prompts 1, 2, ...; what `odd` has for a number is raised, or the end of the data."""

    def __init__(self, odd: dict[int, Exception | None] | None = None) -> None:
        self.given = 0
        self._odd = odd or {}

    def next_prompt(self) -> Prompt | None:
        self.given += 1
        if self.given in self._odd:
            if (error := self._odd[self.given]) is not None:
                raise error
            return None
        return Prompt(str(self.given), "?", (1,), "", "t")

    def validation_prompts(self) -> Sequence[Prompt]:
        return [Prompt("v", "?", (1,), "", "t")]

    def state(self) -> msgspec.Struct:
        return Cursor(self.given)


def with_ahead(source: Numbers, scenario: Callable[[PromptsAhead], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario whose prompts are made whenever it lets the event loop turn."""

    async def main() -> None:
        ahead = PromptsAhead(source, work=InlineWork(), clock=SystemClock())
        running = asyncio.ensure_future(ahead.run(lambda: None))
        async with asyncio.timeout(60):
            await scenario(ahead)
        running.cancel()

    asyncio.run(main())


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_order_and_place_are_those_of_the_source() -> None:
    source = Numbers()

    async def scenario(ahead: PromptsAhead) -> None:
        assert ahead.next_prompt() is None
        assert ahead.state() == Cursor(0)
        drawn: list[str] = []
        while len(drawn) < 3 * AHEAD:
            prompt = ahead.next_prompt()
            if prompt is None:
                await turns()
                continue
            drawn.append(prompt.prompt_id)
            assert ahead.state() == Cursor(len(drawn))
            assert source.given <= len(drawn) + AHEAD
        assert drawn == [str(number) for number in range(1, 3 * AHEAD + 1)]
        assert list(ahead.validation_prompts()) == list(source.validation_prompts())

    with_ahead(source, scenario)


def test_bad_rows_come_in_their_turn() -> None:
    async def scenario(ahead: PromptsAhead) -> None:
        events = RecordingEvents()
        usable = UsablePrompts(ahead, longest=9, events=events)
        assert (usable.next_prompt(), usable.is_late) == (None, True)
        await turns()
        drawn = [prompt.prompt_id for _ in range(3) if (prompt := usable.next_prompt())]
        assert drawn == ["1", "3", "4"]
        assert not usable.is_late
        assert [event.prompt_id for event in events.of(PromptRefused)] == ["row 2"]
        assert usable.state() == Cursor(4)

    with_ahead(Numbers({2: PromptError("row 2: is bad", "row 2")}), scenario)


def test_an_end_and_an_error_stay_what_they_are() -> None:
    async def at_the_end(ahead: PromptsAhead) -> None:
        await turns()
        assert [ahead.next_prompt() is None for _ in range(4)] == [False, False, True, True]

    async def broken(ahead: PromptsAhead) -> None:
        await turns()
        assert ahead.next_prompt() is not None
        for _ in range(2):
            with pytest.raises(ConfigError, match="cannot be read"):
                ahead.next_prompt()

    with_ahead(Numbers({3: None}), at_the_end)
    with_ahead(Numbers({2: ConfigError("cannot be read")}), broken)


def test_rows_that_are_all_bad_are_an_error_all_the_same() -> None:
    class Bad(Numbers):
        def next_prompt(self) -> Prompt | None:
            self.given += 1
            raise PromptError(f"row {self.given}: is bad", f"row {self.given}")

    async def scenario(ahead: PromptsAhead) -> None:
        usable = UsablePrompts(ahead, longest=9, events=RecordingEvents())

        async def draw() -> None:
            while usable.next_prompt() is None:
                await turns()

        with pytest.raises(ConfigError, match=rf"the last one: row {MOST_REFUSED_IN_A_ROW}: is bad"):
            await draw()

    with_ahead(Bad(), scenario)


def test_the_event_loop_turns_while_a_prompt_is_made() -> None:
    may_go_on = threading.Event()

    class Slow(Numbers):
        def next_prompt(self) -> Prompt | None:
            assert may_go_on.wait(60)
            return super().next_prompt()

    async def main() -> None:
        ready = asyncio.Event()
        ahead = PromptsAhead(Slow(), work=ThreadWork("prompts"), clock=SystemClock())
        running = asyncio.ensure_future(ahead.run(ready.set))
        await turns()
        assert ahead.next_prompt() is None  # at once, though one is being made
        may_go_on.set()
        async with asyncio.timeout(60):
            await ready.wait()
        prompt = ahead.next_prompt()
        assert prompt is not None
        assert prompt.prompt_id == "1"
        running.cancel()

    asyncio.run(main())
