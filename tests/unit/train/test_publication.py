"""Capture and publication apart: the trainer is free once its tensors are copied; no capture overtakes an encoder."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar, cast

import pytest
import torch

from paceline.core.commands import CaptureCommand, CaptureReport, PublishCommand
from paceline.core.config import build_config
from paceline.core.errors import DeadlineExceeded, LateCommand, SyncError, VersionError
from paceline.core.manifest import Captured, Published, WeightManifest
from paceline.core.version import Version
from paceline.runtime.system import InlineWork
from paceline.testing.marker_model import MarkerBackend
from paceline.testing.recording import RecordingEvents, RecordingRolloutLog
from paceline.testing.virtual_clock import VirtualClock, run_virtual
from paceline.train.trainer import FullyAsyncTrainer

T = TypeVar("T")
V0, V1, V2 = (Version(1, n).packed for n in range(3))


class SlowWork:
    """Takes so many seconds for each job, whoever waits for it."""

    def __init__(self, clock: VirtualClock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds

    async def run(self, job: Callable[[], T]) -> T:
        await self._clock.sleep(self._seconds)
        return job()


class OrderedSender:
    """Writes down what it is asked for; `fail` is raised by the next publication."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail: SyncError | None = None
        self._version = -1

    def capture(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int, base_version: int | None = None
    ) -> Captured:
        base = None if base_version is None else Version.unpack(base_version).n
        self.calls.append(f"capture {Version.unpack(version).n} against {base}")
        self._version = version
        return Captured(version, "d" * 32, 40)

    def publish(self) -> Published:
        self.calls.append(f"publish {Version.unpack(self._version).n}")
        if self.fail is not None:
            raise self.fail
        return Published(WeightManifest(self._version, (), {}, 40, "d" * 32, "arena-0", "nowhere"))

    def blocking_holders(self) -> list[str]:
        return []

    def close(self) -> None: ...


class Rig:
    def __init__(self, clock: VirtualClock, seconds: float = 5.0) -> None:
        self.clock, self.sender = clock, OrderedSender()
        nobody = cast("Any", None)
        self.trainer = FullyAsyncTrainer(
            build_config({}),
            life=1,
            backend=MarkerBackend(),
            sender=self.sender,
            queue=nobody,
            source=nobody,
            work=InlineWork(),
            publish_work=SlowWork(clock, seconds),
            rollout_log=RecordingRolloutLog(),
            clock=clock,
            events=RecordingEvents(),
        )

    async def capture(self, version: int, within: float = 60.0, base: int | None = None) -> CaptureReport:
        command = CaptureCommand(version, sync_id=1, deadline_wall=self.clock.wall() + within, base_version=base)
        return await self.trainer.capture_weights(command)

    def publish(self, version: int, within: float = 60.0) -> asyncio.Task[Any]:
        command = PublishCommand(version, sync_id=1, deadline_wall=self.clock.wall() + within)
        return asyncio.ensure_future(self.trainer.publish_weights(command))


def with_rig(scenario: Callable[[Rig], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock) -> None:
        async with asyncio.timeout(1000):
            await scenario(Rig(clock))

    run_virtual(main)


def test_a_capture_returns_before_anything_is_published() -> None:
    async def scenario(rig: Rig) -> None:
        report = await rig.capture(V0)
        assert (report.version, report.bytes, report.seconds) == (V0, 40, 0.0)
        assert rig.sender.calls == ["capture 0 against None"]
        published = await rig.publish(V0)
        assert published.published.manifest.version == V0
        assert published.seconds == 5.0
        assert rig.sender.calls[-1] == "publish 0"
        assert (await rig.trainer.captured_manifest(V0)).version == V0

    with_rig(scenario)


def test_a_capture_waits_for_a_publication_whose_caller_has_left() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.capture(V0)
        left = rig.publish(V0)
        await rig.clock.sleep(1)
        left.cancel()
        report = await rig.capture(V1, base=V0)
        assert report.wait_seconds == pytest.approx(4.0, abs=0.1)
        assert rig.sender.calls == ["capture 0 against None", "publish 0", "capture 1 against 0"]

    with_rig(scenario)


def test_a_publication_that_does_not_end_is_named_at_the_deadline_of_the_capture() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.capture(V0)
        rig.publish(V0)
        await rig.clock.sleep(0.1)
        with pytest.raises(DeadlineExceeded, match="still publishes the version before"):
            await rig.capture(V1, within=1.0)
        assert (await rig.capture(V1)).version == V1

    with_rig(scenario)


def test_what_is_not_captured_or_asked_for_too_late_is_not_published() -> None:
    async def scenario(rig: Rig) -> None:
        with pytest.raises(VersionError, match="cannot be published"):
            await rig.publish(V0)
        await rig.capture(V0)
        with pytest.raises(VersionError, match=r"has captured 1\.0; 1\.1 cannot"):
            await rig.publish(V1)
        with pytest.raises(LateCommand):
            await rig.publish(V0, within=-1.0)
        assert rig.sender.calls == ["capture 0 against None"]

    with_rig(scenario)


def test_a_failed_publication_is_an_error_of_that_sync_alone() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.capture(V0)
        rig.sender.fail = SyncError("the disk is full")
        with pytest.raises(SyncError, match="the disk is full"):
            await rig.publish(V0)
        rig.sender.fail = None
        await rig.capture(V1)
        assert (await rig.publish(V1)).published.manifest.version == V1

    with_rig(scenario)


def test_settling_waits_for_the_work_and_no_longer_than_asked() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.trainer.settle(2.0)
        await rig.capture(V0)
        rig.publish(V0)
        await rig.clock.sleep(0.1)
        began = rig.clock.now()
        await rig.trainer.settle(2.0)
        assert rig.clock.now() - began == pytest.approx(2.0)
        await rig.trainer.settle(60.0)
        assert rig.sender.calls[-1] == "publish 0"

    with_rig(scenario)
