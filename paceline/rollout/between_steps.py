"""What waits to be done between two decode steps, in the order in which it was asked for.

On the event loop, while no step runs. A swap may have been made by then in the thread that decodes (`step_swap`); it is
settled here, at once. For one who asked and went away before his turn nothing is done, unless it is done already.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import PacelineError
from paceline.rollout.step_swap import StepSwap


@dataclass(slots=True)
class Request:
    """One thing to do; `swap` where it settles one."""

    action: Callable[[], Any]
    done: asyncio.Future[Any]
    swap: StepSwap | None = None
    has_run: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether it has to be done still."""
        made = self.swap is not None and self.swap.is_made
        return not self.has_run and (made or not self.done.cancelled())


class BetweenSteps:
    """Of one decode loop."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add(self, action: Callable[[], Any], swap: StepSwap | None = None) -> Request:
        """Its `done` has the action's result, or its error."""
        request = Request(action, asyncio.get_running_loop().create_future(), swap)
        self._requests.append(request)
        return request

    def run_all(self) -> None:
        """Do all that waits."""
        while self._requests:
            self.run(self._requests.popleft())

    def run(self, request: Request) -> None:
        """Do one out of its turn, or nothing where it was done."""
        if not request.is_wanted:
            return
        request.has_run = True
        try:
            result = request.action()
        except PacelineError as error:
            if not request.done.done():
                request.done.set_exception(error)
        else:
            if not request.done.done():
                request.done.set_result(result)

    def fail(self, error: PacelineError) -> None:
        """Nothing more is done here."""
        for request in self._requests:
            if not request.done.done():
                request.done.set_exception(error)
        self._requests.clear()
