"""ProcessReward: a reward function in processes of its own, apart from the rollouter.

A `def` function has up to `processes` of them, one call each; a call that is cancelled (its deadline) ends its process,
and another one is started in its place at once. An `async def` function has one process for all its calls; when that
ends, calls that it had not answered go to the next one, once.

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
from paceline.reward.process_handle import ProcessEnded, ProcessHandle, start_process

# Beyond these a process is ended with all that its function has left behind: children that live, and that have ended.
MOST_CHILDREN, MOST_ENDED = 16, 256


class ProcessReward:
    """Implements `core.ports.RewardFn`; made by `open_reward`.

    `started` counts the processes so far, `most_children` is how many of its own any of them had when a call ended.
    """

    def __init__(self, spec: FunctionSpec, log: Path, first: ProcessHandle, is_async: bool, processes: int) -> None:
        self._spec = spec
        self._log = log
        self.is_async = is_async
        self._most = 1 if is_async else processes
        self._idle: asyncio.Queue[ProcessHandle | str] = asyncio.Queue()  # a text: why there is no other process
        self._idle.put_nowait(first)
        self._alive = {first}
        self._starting: set[asyncio.Task[None]] = set()
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
        """Return once a process waits for a call."""
        self._idle.put_nowait(await self._take())

    async def close(self) -> None:
        """End every process."""
        self._closed = True
        starting = list(self._starting)
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        for process in self._alive:
            process.kill()
        self._alive.clear()

    async def _ask_own(self, call: Call) -> Reply:
        process = await self._take()
        try:
            reply = await process.ask(call)
        except BaseException as error:
            process.kill()  # it hangs, or is dead already
            self._forget(process)
            if isinstance(error, ProcessEnded):
                raise RewardError(f"reward: {error.message}") from error
            raise
        living, ended = reply.children
        if living > MOST_CHILDREN or ended > MOST_ENDED:
            process.kill()
            self._forget(process)
        else:
            self._idle.put_nowait(process)
        return reply

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
            if self._idle.empty() and len(self._alive) + len(self._starting) < self._most:
                self._start_another()
            process = await self._idle.get()
            if isinstance(process, str):
                raise RewardError(f"reward: no process can be started any more: {process}")
            if process.alive:
                return process
            self._forget(process)

    def _forget(self, process: ProcessHandle) -> None:
        if process in self._alive:
            self._alive.remove(process)
            self._start_another()

    def _start_another(self) -> None:
        if self._closed:
            return
        self._starting.add(asyncio.create_task(self._start()))

    async def _start(self) -> None:
        made: ProcessHandle | str
        try:
            made, _ = await start_process(self._spec, self._log)
        except (ConfigError, OSError) as error:
            # It could be loaded before. Whoever waits learns it; the next call tries again.
            made = error.message if isinstance(error, ConfigError) else str(error)
        else:
            self._alive.add(made)
            self.started += 1
        finally:
            # Before anybody who waits looks at what there is.
            self._starting.discard(cast("asyncio.Task[None]", asyncio.current_task()))
        self._idle.put_nowait(made)


async def open_reward(spec: FunctionSpec, log: Path, processes: int) -> ProcessReward:
    """The reward of a function, with its first process ready.

    Raises:
        ConfigError: the function cannot be used.
    """
    first, is_async = await start_process(spec, log)
    return ProcessReward(spec, log, first, is_async, processes)
