"""Does the control plane keep what it should forget? Allocated blocks over virtual time."""

from __future__ import annotations

import asyncio
import gc
import sys

from paceline.core.config import Config
from paceline.testing.fake_fleet import ControlPlane
from paceline.testing.virtual_clock import VirtualClock, run_virtual


def blocks_over_time(config: Config, *, response_seconds: float, seconds: float, looks: int) -> tuple[list[int], int]:
    """Blocks that Python has allocated at `looks` equal distances over `seconds`, and samples made in all."""
    counts: list[int] = []

    async def main(clock: VirtualClock) -> int:
        plane = ControlPlane(config, tokens=8, response_seconds=response_seconds, clock=clock)

        async def look() -> None:
            while True:
                await clock.sleep(seconds / looks)
                gc.collect()
                counts.append(sys.getallocatedblocks())

        looking = asyncio.ensure_future(look())
        report = await plane.run(seconds * (1 + 0.5 / looks))
        looking.cancel()
        return report.samples

    samples = run_virtual(main)
    return counts, samples
