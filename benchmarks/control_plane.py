"""How the loops bear many replicas: event-loop lag and samples per second with 64 fake replicas of 256 sequences each.

    python benchmarks/control_plane.py [--replicas 64] [--places 256] [--response-seconds 8] [--seconds 20]

All loops (rollouter, message queue, batcher, synchronizer) run in one process on one event loop, on the real clock.
The lag is how much later than asked a sleep of 5 ms returns. Beside it, for a machine that is busy with other things,
stands the loop's own share of it: the lag, but no more than the processor time that this process used meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import time

from paceline.core.config import Config, build_config
from paceline.runtime.collector import settle_collector
from paceline.runtime.system import SystemClock
from paceline.testing.fake_fleet import ControlPlane, ControlPlaneReport
from paceline.testing.memory_growth import blocks_over_time

PROBE_SECONDS = 0.005
WARM_UP_SECONDS = 3.0
RESPONSES = 8


def fleet_config(replicas: int, places: int) -> Config:
    """A run that never starves the fleet: two windows of what is in flight."""
    batch = max(1, replicas * places // RESPONSES // 4)
    return build_config(
        {
            "actor": {"ppo_mini_batch_size": batch},
            "async_training": {"staleness_threshold": 1.0, "trigger_parameter_sync_step": 4},
            "rollout": {
                "n": RESPONSES,
                "num_replicas": replicas,
                "max_num_seqs": places,
                "total_rollout_steps": 1_000_000_000,
            },
            "trainer": {"test_freq": 0, "val_before_train": False},
        }
    )


async def measure(arguments: argparse.Namespace) -> tuple[ControlPlaneReport, list[float], list[float]]:
    """The report, and after the warm-up the lags of the probe and the loop's own share of them, each sorted."""
    clock = SystemClock()
    config = fleet_config(arguments.replicas, arguments.places)
    plane = ControlPlane(config, tokens=arguments.tokens, response_seconds=arguments.response_seconds, clock=clock)
    settle_collector()  # as every process of a run does
    lags: list[float] = []
    own: list[float] = []

    async def probe() -> None:
        await asyncio.sleep(WARM_UP_SECONDS)
        while True:
            asked, worked = time.perf_counter(), time.process_time()
            await asyncio.sleep(PROBE_SECONDS)
            lags.append(time.perf_counter() - asked - PROBE_SECONDS)
            own.append(min(lags[-1], time.process_time() - worked))

    probing = asyncio.ensure_future(probe())
    report = await plane.run(arguments.seconds)
    probing.cancel()
    return report, sorted(lags), sorted(own)


def quantiles(values: list[float]) -> str:
    """In milliseconds, of sorted seconds."""
    at = {share: values[min(len(values) - 1, int(share * len(values)))] * 1e3 for share in (0.5, 0.9, 0.99, 1.0)}
    return ", ".join(f"p{share * 100:g} {value:.1f}" for share, value in at.items())


def main() -> None:
    parser = argparse.ArgumentParser(description="event-loop lag and samples per second of the loops")
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--places", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--response-seconds", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--virtual-hour", action="store_true", help="memory over an hour of virtual time instead")
    arguments = parser.parse_args()
    if arguments.virtual_hour:
        counts, samples = blocks_over_time(fleet_config(4, 16), response_seconds=8.0, seconds=3600.0, looks=12)
        print(f"{samples} samples in an hour of virtual time; allocated blocks every 5 minutes: {counts}")
        return
    profile = cProfile.Profile()
    if arguments.profile:
        profile.enable()
    began = time.process_time()
    report, lags, own = asyncio.run(measure(arguments))
    busy = (time.process_time() - began) / report.seconds
    profile.disable()
    print(
        f"{arguments.replicas} replicas x {arguments.places} sequences: {report.samples_per_second:.0f} samples/s "
        f"({report.samples_per_second * RESPONSES:.0f} responses/s), {report.versions} versions in "
        f"{report.seconds:.0f} s, {busy:.2f} cores busy"
    )
    print(f"event-loop lag, ms: {quantiles(lags)}; own share: {quantiles(own)}")
    if arguments.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
