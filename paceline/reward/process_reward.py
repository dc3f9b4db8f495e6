"""ProcessReward: a reward function in processes of its own, apart from the rollouter.

A `def` function has up to `processes` of them, one call each; a call that is cancelled (its deadline) ends its process.
One that takes a quarter of its deadline may come to that: another process is started beside it and has loaded the
function before it is needed, so a hang costs its own place for its own deadline, and nobody else's time. An `async def`
function has one process for all its calls; when that ends, calls that it had not answered go to the next one, once.

Law: whatever a function does (hang, fork, exit, print, take the interpreter down) costs the call in which it does it.
"""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path
from typing import cast

from paceline.core.errors import ConfigError, RewardError
from paceline.core.sample import Prompt, Score
from paceline.reward.function_spec import Call, FunctionSpec, Reply
from paceline.reward.process_handle import ProcessEnded, ProcessHandle, all_reaped, start_process

# Beyond these a process is ended with all that its function has left behind: children that live, and that have ended.
MOST_CHILDREN, MOST_ENDED = 16, 256
LATE_SHARE = 0.25  # of its deadline


class ProcessReward:
    """Implements `core.ports.PreparedReward`; made by `open_reward`.

    `deadline_seconds` is when a call is cancelled. `started` counts the processes so far, `most_children` is how many
    of its own any of them had when a call ended.
    """

    def __init__(
        self,
        spec: FunctionSpec,
        log: Path,
        first: ProcessHandle,
        is_async: bool,
        processes: int,
        deadline_seconds: float,
    ) -> None:
        self._spec = spec
        self._log = log
        self.is_async = is_async
        self._most = 1 if is_async else processes
        self._late_seconds = LATE_SHARE * deadline_seconds
        self._idle: asyncio.Queue[ProcessHandle | str] = asyncio.Queue()  # a text: why there is no other process
        self._idle.put_nowait(first)
        self._alive = {first}
        self._late: set[ProcessHandle] = set()  # in calls that may have to be ended
        self._ending: set[ProcessHandle] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._waiting = 0
        self._numbers = count()
        self._closed = False
        self.started = 1
        self.most_children = 0

    async def score(self, prompt: Prompt, response_text: str) -> Score:
        """See the port. Cancelling it ends what the function does.

        Raises:
            RewardError: there is no score, and why.
        """
        call = Call(next(self._numbers), prompt.data_source, response_text, prompt.ground_truth, prompt.extra_info)
        reply = await (self._ask_shared(call) if self.is_async else self._ask_own(call))
        self.most_children = max(self.most_children, sum(reply.children))
        if reply.error:
            raise RewardError(f"reward: {reply.error}")
        return Score(reply.score, reply.metrics)

    async def ready(self) -> None:
        """Return once a process waits for a call; whoever asks next, without a pause, has it.

        Raises:
            RewardError: no process can be started any more.
        """
        self._idle.put_nowait(await self._take())

    async def close(self) -> None:
        """End every process."""
        self._closed = True
        starting = list(self._starting)
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        for process in list(self._alive):
            self._end(process)
        await all_reaped(self._ending)

    async def _ask_own(self, call: Call) -> Reply:
        process = await self._take()
        late = asyncio.get_running_loop().call_later(self._late_seconds, self._expect_its_end, process)
        try:
            reply = await process.ask(call)
        except BaseException as error:
            self._end(process)  # it hangs, or is dead already
            self._start_another()
            if isinstance(error, ProcessEnded):
                raise RewardError(f"reward: {error.message}") from error
            raise
        finally:
            late.cancel()
            self._late.discard(process)
        living, ended = reply.children
        if living > MOST_CHILDREN or ended > MOST_ENDED:
            self._end(process)
            self._start_another()
        else:
            self._idle.put_nowait(process)
        return reply

    def _expect_its_end(self, process: ProcessHandle) -> None:
        self._late.add(process)
        self._start_another()

    async def _ask_shared(self, call: Call) -> Reply:
        for last in (False, True):
            process = await self._take()
            self._idle.put_nowait(process)  # at once: it takes other calls too
            try:
                return await process.ask(call)
            except ProcessEnded as error:
                if last:
                    raise RewardError(f"reward: {error.message}, twice") from error
        raise AssertionError("the last try returns or raises")

    async def _take(self) -> ProcessHandle:
        while True:
            if self._idle.empty():
                self._start_another()
            self._waiting += 1
            try:
                process = await self._idle.get()
            finally:
                self._waiting -= 1
            if isinstance(process, str):
                if self._waiting:
                    self._start_another()  # for the next one who waits
                raise RewardError(f"reward: no process can be started any more: {process}")
            if process.alive:
                return process
            self._end(process)

    def _end(self, process: ProcessHandle) -> None:
        """It gets no call any more."""
        process.kill()
        self._alive.discard(process)
        self._late.discard(process)
        if not process.reaped.done():
            self._ending.add(process)
            process.reaped.add_done_callback(lambda _: self._ending.discard(process))

    def _start_another(self) -> None:
        """Unless there are as many as there may be: one for each place, and one more for each late call."""
        if not self._closed and len(self._alive) + len(self._starting) < self._most + len(self._late):
            self._starting.add(asyncio.create_task(self._start()))

    async def _start(self) -> None:
        error = ""
        try:
            made, _ = await start_process(self._spec, self._log)
            self._alive.add(made)
            self.started += 1
            self._idle.put_nowait(made)
        except (ConfigError, OSError) as problem:
            error = problem.message if isinstance(problem, ConfigError) else str(problem)
        finally:
            # Before anybody who waits looks at what there is.
            self._starting.discard(cast("asyncio.Task[None]", asyncio.current_task()))
        if error and self._waiting and not self._alive and not self._starting:
            # It could be loaded before. Whoever waits learns it: no other one will come. The next call tries again.
            self._idle.put_nowait(error)


async def open_reward(spec: FunctionSpec, log: Path, processes: int, deadline_seconds: float) -> ProcessReward:
    """The reward of a function, with its first process ready. `deadline_seconds` is when its calls are cancelled.

    Raises:
        ConfigError: the function cannot be used.
    """
    first, is_async = await start_process(spec, log)
    return ProcessReward(spec, log, first, is_async, processes, deadline_seconds)
