"""SIGINT and SIGTERM, from the first import to the summary: none is lost, none breaks an orderly stop.

    raised (the command line is checked)  ->  remembered (`StopSignal`)  ->  the run is stopped, once

While a signal is only remembered, nothing of the run is interrupted in the middle; `race` ends the run, and `raising`
marks the one place that blocks the main thread for long. A second signal changes nothing.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from paceline.core.errors import RunInterrupted

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class StopRequested(BaseException):
    """A stop signal, raised where the main thread stands; no `Exception`, so that no library takes it for its own."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def as_error(self) -> RunInterrupted:
        """What callers of a run see."""
        return RunInterrupted(f"stopped by {signal.Signals(self.number).name}", self.number)


def raise_stop_signals() -> None:
    """From now on both signals raise `StopRequested` in the main thread; for the time before a run."""
    for number in NUMBERS:
        signal.signal(number, _raise)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise StopRequested(number)


class StopSignal:
    """Both signals, remembered while the context lasts. To be used in the main thread."""

    def __init__(self) -> None:
        self._asked: StopRequested | None = None
        self._raises = False
        self._wake: Callable[[], object] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in NUMBERS}
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def install(self) -> None:
        """Take over both signals; may be called again, after a library took them."""
        for number in NUMBERS:
            signal.signal(number, self._on_signal)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Here a signal does not wait for the event loop.

        Raises:
            StopRequested: a signal came, now or before.
        """
        self._raises = True
        try:
            if self._asked is not None:
                raise self._asked
            yield
        finally:
            self._raises = False

    async def race(self, work: Awaitable[T]) -> T:
        """The result of `work`.

        Raises:
            RunInterrupted: a signal came first; `work` is cancelled.
        """
        import asyncio  # takes a while, and signals count from the first import on

        loop = asyncio.get_running_loop()
        asked = asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(asked.set)
        if self._asked is not None:
            asked.set()
        task = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(asked.wait())
        try:
            racing: set[asyncio.Future[Any]] = {task, stopped}
            await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
            if self._asked is None:
                return task.result()
            raise self._asked.as_error()
        finally:
            self._wake = None
            task.cancel()
            stopped.cancel()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked is not None:
            return
        self._asked = StopRequested(number)
        if self._wake is not None:
            self._wake()
        if self._raises:
            raise self._asked
