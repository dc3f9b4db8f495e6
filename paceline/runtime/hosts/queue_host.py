"""The process of the message queue; imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.commands import QueueStatistics
from paceline.message_queue import MessageQueue
from paceline.runtime.hosts.host import HostProcess
from paceline.runtime.spec import RunSpec


class QueueHost:
    """Holds the `MessageQueue`."""

    def __init__(self, spec: RunSpec, role: str) -> None:
        self._process = HostProcess(spec, role)
        config = spec.config
        self._queue = MessageQueue(
            capacity=config.max_required_samples,
            producers=["rollouter"],
            put_timeout_seconds=config.trainer.stall_timeout_seconds,
            clock=self._process.clock,
            events=self._process.events,
        )
        self._stopped = asyncio.Event()

    async def start(self) -> None:
        """Nothing to build."""
        self._process.started()

    async def connect(self, peers: Mapping[str, Any]) -> None:
        """The queue calls nobody."""

    async def run(self) -> None:
        """Serve until stopped."""
        await self._stopped.wait()

    async def stop(self) -> None:
        """Wake everybody who waits for the queue."""
        await self._queue.shutdown()
        self._process.events.close()
        self._stopped.set()

    async def put_samples(self, items: Sequence[bytes]) -> int:
        """See `MessageQueue`."""
        return await self._queue.put_samples(items)

    async def get_samples(self, count: int, wait_seconds: float) -> tuple[list[bytes], int]:
        """See `MessageQueue`."""
        return await self._queue.get_samples(count, wait_seconds)

    async def peek_samples(self) -> list[bytes]:
        """See `MessageQueue`."""
        return await self._queue.peek_samples()

    async def put_validate(self, result: bytes) -> None:
        """See `MessageQueue`."""
        await self._queue.put_validate(result)

    async def get_validate(self) -> bytes | None:
        """See `MessageQueue`."""
        return await self._queue.get_validate()

    async def update_param_version(self, version: int) -> None:
        """See `MessageQueue`."""
        await self._queue.update_param_version(version)

    async def get_statistics(self) -> QueueStatistics:
        """See `MessageQueue`."""
        return await self._queue.get_statistics()

    async def finish(self, producer: str) -> None:
        """See `MessageQueue`."""
        await self._queue.finish(producer)

    async def fail(self, producer: str, error: str) -> None:
        """See `MessageQueue`."""
        await self._queue.fail(producer, error)
