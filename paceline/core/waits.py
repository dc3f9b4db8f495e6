"""Law L2: no wait without a deadline and a named culprit.

`Waits.bounded` is the one way in which a loop waits for another part. A wait that lasts is announced (`wait.began`),
so that a person sees who waits for what since when; at its deadline it raises `DeadlineExceeded` with the culprit's
name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from paceline.core.errors import DeadlineExceeded
from paceline.core.events import EventSink, WaitBegan, WaitEnded
from paceline.core.ports import Clock

T = TypeVar("T")

ANNOUNCE_AFTER_SECONDS = 3.0


class Waits:
    """The waits of one part, `who`."""

    def __init__(self, *, who: str, clock: Clock, events: EventSink) -> None:
        self._who = who
        self._clock = clock
        self._events = events

    async def bounded(self, awaitable: Awaitable[T], *, seconds: float, what: str, culprit: str) -> T:
        """Await with a deadline.

        Raises:
            DeadlineExceeded: `seconds` passed; names `culprit`. The awaitable is cancelled on this side only.
        """
        began = self._clock.now()
        since_wall = self._clock.wall()
        announced = False

        def announce() -> None:
            nonlocal announced
            announced = True
            self._events.emit(WaitBegan(who=self._who, what=what, since_wall=since_wall))

        timer = None
        if seconds > ANNOUNCE_AFTER_SECONDS:
            timer = asyncio.get_running_loop().call_later(ANNOUNCE_AFTER_SECONDS, announce)
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                return await awaitable
        except TimeoutError as error:
            if not deadline.expired():
                raise
            message = f"{self._who} waited {seconds:g} s for {what}: {culprit} did not answer"
            raise DeadlineExceeded(message, culprit, seconds) from error
        finally:
            if timer is not None:
                timer.cancel()
            if announced:
                self._events.emit(WaitEnded(who=self._who, what=what, seconds=self._clock.now() - began))
