"""VllmPusher: any trainer's weights to running vLLM servers, verified, with nothing else of paceline around it.

Needs the base install and `httpx2` on this side, vLLM with paceline beside it on the other (docs/vllm.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from paceline.core.errors import PacelineError
from paceline.core.manifest import WeightManifest
from paceline.engine.vllm_commands import Hello, ReceiverSpec
from paceline.engine.vllm_control import VllmWeights
from paceline.engine.vllm_http import VllmHttpServer
from paceline.runtime.system import SystemClock

FROM_SHARED_MEMORY = ReceiverSpec("shared_memory")


class VllmPusher:
    """Brings published versions to vLLM servers, one after another, so that the others go on serving.

    Args:
        urls: of servers that were started with the paceline weight-transfer backend.
        receiver: how their workers get the bytes: shared memory of this host, or a filesystem that both reach.
        api_key: of the servers; None: none.
        wait_seconds: how long requests in flight may take to end; then they go on under the new weights.
        start_seconds, timeout_seconds: how long a server may take to answer at first, and for each step after that.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        receiver: ReceiverSpec = FROM_SHARED_MEMORY,
        api_key: str | None = None,
        wait_seconds: float = 10.0,
        start_seconds: float = 30.0,
        timeout_seconds: float = 120.0,
    ) -> None:
        self._urls = list(urls)
        self._receiver = receiver
        self._api_key = api_key
        self._wait_seconds = wait_seconds
        self._start_seconds = start_seconds
        self._timeout_seconds = timeout_seconds

    def push(self, manifest: WeightManifest) -> dict[str, float]:
        """Bring this version to every server; returns by URL for how many seconds each did not generate.

        Raises:
            PacelineError: the first server that did not take it, by name. Those before it serve the version, those
                after it what they served; it is paused if nobody knows what it serves, and takes the next push.
        """
        return asyncio.run(self.push_async(manifest))

    async def push_async(self, manifest: WeightManifest) -> dict[str, float]:
        """The same on a running event loop."""
        clock = SystemClock()
        servers = {url: self._server(url, clock) for url in self._urls}
        try:
            for server in servers.values():
                await server.start()
            deadline = clock.wall() + self._timeout_seconds
            await asyncio.gather(*(server.stage(manifest, deadline) for server in servers.values()))
            return {url: await self._swap(server, manifest, clock) for url, server in servers.items()}
        finally:
            for server in servers.values():
                await server.close()

    async def _swap(self, server: VllmHttpServer, manifest: WeightManifest, clock: SystemClock) -> float:
        before = await server.weight_version()
        began = clock.now()
        try:
            await server.pause(clock.wall() + self._timeout_seconds)
        except PacelineError:
            with suppress(PacelineError):  # it may have begun to pause
                await server.resume()
            raise
        try:
            await server.load(manifest.version)
            await server.confirm(manifest.version, manifest.digest)
        except PacelineError:
            if before is not None:  # its workers still hold it: all or nothing
                await server.load(before)
                await server.resume()
            raise
        await server.resume()
        return clock.now() - began

    def _server(self, url: str, clock: SystemClock) -> VllmHttpServer:
        def make_weights(calls: VllmHttpServer) -> VllmWeights:
            return VllmWeights(calls, name=url, receiver=self._receiver, clock=clock)

        return VllmHttpServer(
            url,
            name="server",
            clock=clock,
            make_weights=make_weights,
            hello=Hello(),
            api_key=self._api_key,
            start_seconds=self._start_seconds,
            call_seconds=self._timeout_seconds,
            wait_seconds=self._wait_seconds,
        )
