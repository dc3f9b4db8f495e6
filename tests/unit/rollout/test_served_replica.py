"""A replica over a server: versions of tokens, swaps, drains, pins (V1, V4, V5, V6, L1)."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from paceline.core.errors import DigestMismatch, LateCommand, SyncError, VersionError
from paceline.core.events import ForeignRequestsMixed, ResponsesAborted
from paceline.core.version import Version
from tests.unit.rollout.served_rig import LIFE, ServedRig, makers, manifest_of, numbers, request, with_rig

BOTH = pytest.mark.parametrize("streams", ["kept", "closed"])
Streams = Literal["kept", "closed"]


def test_no_traffic_before_the_first_confirmed_version() -> None:
    async def scenario(rig: ServedRig) -> None:
        with pytest.raises(SyncError, match="no confirmed version"):
            await rig.exchange(request("a"))
        await rig.stage(0)
        with pytest.raises(SyncError, match="no confirmed version"):
            await rig.exchange(request("a"))
        assert rig.server.begun == []
        await rig.swap(0)
        await rig.exchange(request("a"))
        (done,) = await rig.finish("a")
        assert numbers(done) == makers(done) == [0] * 12

    with_rig(scenario)


@BOTH
@pytest.mark.parametrize("tokens_per_batch", [1, 5])
def test_every_token_carries_the_version_that_made_it(streams: Streams, tokens_per_batch: int) -> None:
    async def scenario(rig: ServedRig) -> None:
        await rig.sync(0)
        names = [f"{wave}:{index}" for wave in range(20) for index in range(4)]
        for wave in range(20):
            await rig.exchange(*(request(f"{wave}:{index}", tokens=20 + 13 * index) for index in range(4)))
            await rig.clock.sleep(0.1)
            await rig.sync(wave + 1)
        crossed = 0
        for done in await rig.finish(*names):
            assert numbers(done) == makers(done)
            assert len(done.token_ids) == 20 + 13 * (int(done.request_id.partition(":")[2]))
            assert numbers(done) == sorted(numbers(done))
            crossed += len(set(numbers(done))) > 1
        assert crossed > 40, "hardly any request went on over a sync"

    with_rig(scenario, streams=streams, tokens_per_batch=tokens_per_batch)


@BOTH
def test_no_token_is_made_by_half_loaded_weights(streams: Streams) -> None:
    async def scenario(rig: ServedRig) -> None:
        await rig.sync(0)
        await rig.exchange(*(request(str(index), tokens=200) for index in range(8)))
        for n in range(1, 6):
            rig.server.failing_loads = n % 2
            await rig.stage(n)
            if n % 2:
                with pytest.raises(SyncError, match="half-way"):
                    await rig.swap(n)
            else:
                await rig.swap(n)
        for done in await rig.finish(*(str(index) for index in range(8))):
            assert numbers(done) == makers(done)
            assert set(numbers(done)) <= {0, 2, 4}

    with_rig(scenario, streams=streams)


def test_a_failed_load_brings_the_version_before_back() -> None:
    async def scenario(rig: ServedRig) -> None:
        await rig.sync(0)
        rig.server.failing_loads = 1
        await rig.stage(1)
        with pytest.raises(SyncError, match="half-way"):
            await rig.swap(1)
        report = await rig.replica.report()
        assert (report.state, report.version) == ("ready", Version(LIFE, 0).packed)
        await rig.exchange(request("a"))
        assert makers((await rig.finish("a"))[0]) == [0] * 12

    with_rig(scenario)


def test_a_load_that_went_wrong_unnoticed_is_found_by_its_proof() -> None:
    async def scenario(rig: ServedRig) -> None:
        await rig.sync(0)
        await rig.exchange(request("a", tokens=100))
        rig.server.silent_failures = 1
        await rig.stage(1)
        with pytest.raises(DigestMismatch, match="something else entered"):
            await rig.swap(1)
        assert (await rig.replica.report()).version == Version(LIFE, 0).packed
        assert makers((await rig.finish("a"))[0]) == [0] * 100

    with_rig(scenario)


def test_where_neither_version_can_be_proved_nothing_is_made_until_a_full_snapshot() -> None:
    async def scenario(rig: ServedRig) -> None:
        await rig.sync(0)
        await rig.exchange(request("a"))
        rig.server.failing_loads = 2
        await rig.stage(1)
        with pytest.raises(SyncError, match="half-way"):
            await rig.swap(1)
        assert (await rig.replica.report()).state == "fenced"
        await rig.clock.sleep(1.0)
        assert rig.completions == {}
        await rig.sync(1)
        (done,) = await rig.finish("a")
        assert numbers(done) == makers(done)
        assert set(numbers(done)) <= {0, 1}

    with_rig(scenario)


def test_a_version_exists_only_after_it_was_confirmed() -> None:
    async def scenario(rig: ServedRig) -> None:
        await rig.sync(0)
        await rig.stage(1)
        swapping = asyncio.ensure_future(rig.swap(1))
        while not swapping.done():
            report = await rig.replica.report()
            assert report.version == Version(LIFE, 0).packed
            await rig.clock.sleep(0.005)
        assert (await rig.replica.report()).version == Version(LIFE, 1).packed

    with_rig(scenario)


def test_late_commands_and_old_versions_are_refused() -> None:
    async def scenario(rig: ServedRig) -> None:
        await rig.sync(1)
        with pytest.raises(VersionError, match=r"serves 1\.1; 1\.1 is not newer"):
            await rig.stage(1)
        with pytest.raises(LateCommand, match="after its deadline"):
            await rig.stage(2, seconds=-1.0)
        with pytest.raises(SyncError, match="is not staged"):
            await rig.swap(2)
        other = manifest_of(5)
        rig.replica._weights._life = 2  # noqa: SLF001 - a replica of another life
        with pytest.raises(LateCommand, match="lives in life 2"):
            await rig.stage(5)
        assert other.version not in rig.server.held

    with_rig(scenario)


@BOTH
def test_without_partial_rollout_sequences_end_under_their_version(streams: Streams) -> None:
    async def scenario(rig: ServedRig) -> None:
        await rig.sync(0)
        await rig.exchange(*(request(str(index), tokens=30) for index in range(4)))
        await rig.clock.sleep(0.1)
        swapping = asyncio.ensure_future(rig.sync(1))
        await rig.clock.sleep(0.1)
        await rig.exchange(request("late", tokens=5))
        await swapping
        for done in await rig.finish("0", "1", "2", "3"):
            assert (numbers(done), done.finish_reason) == ([0] * 30, "length")
        assert numbers((await rig.finish("late"))[0]) == [1] * 5

    with_rig(scenario, streams=streams, partial_rollout=False)


def test_what_does_not_end_in_time_is_given_back_and_counted() -> None:
    async def scenario(rig: ServedRig) -> None:
        await rig.sync(0)
        await rig.exchange(request("long", tokens=10_000), request("short", tokens=20))
        await rig.clock.sleep(0.1)
        await rig.sync(1)
        long, short = await rig.finish("long", "short")
        assert (long.finish_reason, short.finish_reason) == ("abort", "length")
        (aborted,) = rig.events.of(ResponsesAborted)
        assert aborted.requests == ["long"]

    with_rig(scenario, partial_rollout=False, drain_seconds=2.0)


def test_a_swap_waits_for_the_end_of_a_pin() -> None:
    async def scenario(rig: ServedRig) -> None:
        await rig.sync(0)
        version = Version(LIFE, 0).packed
        assert await rig.replica.pin(version)
        assert not await rig.replica.pin(Version(LIFE, 1).packed)
        await rig.exchange(request("validation", tokens=100, pinned=version))
        await rig.stage(1)
        swapping = asyncio.ensure_future(rig.swap(1))
        (done,) = await rig.finish("validation")
        assert not swapping.done()
        assert set(done.versions) == {version}
        await rig.replica.unpin(version)
        assert (await swapping).version == Version(LIFE, 1).packed

    with_rig(scenario)


def test_a_pin_that_does_not_end_refuses_the_swap_by_name() -> None:
    async def scenario(rig: ServedRig) -> None:
        await rig.sync(0)
        await rig.replica.pin(Version(LIFE, 0).packed)
        await rig.stage(1)
        with pytest.raises(SyncError, match=r"serves 1\.0 to a validation"):
            await rig.swap(1, seconds=4.0)
        await rig.replica.unpin(Version(LIFE, 0).packed)
        await rig.swap(1)

    with_rig(scenario)


@BOTH
def test_a_pause_is_a_barrier(streams: Streams) -> None:
    async def scenario(rig: ServedRig) -> None:
        await rig.sync(0)
        await rig.exchange(request("a", tokens=100))
        await rig.clock.sleep(0.2)
        await rig.replica.pause()
        await rig.replica.pause()
        await rig.sync(1)
        await rig.clock.sleep(5.0)
        assert rig.completions == {}
        await rig.replica.resume()
        await rig.replica.resume()
        (done,) = await rig.finish("a")
        assert numbers(done) == makers(done)
        assert set(numbers(done)) == {0, 1}

    with_rig(scenario, streams=streams)


def test_requests_of_others_that_were_cut_are_on_record() -> None:
    async def scenario(rig: ServedRig) -> None:
        rig.server.mixed_by_next_pause = 3
        await rig.sync(0)
        (mixed,) = rig.events.of(ForeignRequestsMixed)
        assert mixed.requests == 3

    with_rig(scenario, streams="closed")


def test_a_request_that_came_complete_comes_back() -> None:
    async def scenario(rig: ServedRig) -> None:
        await rig.sync(0)
        whole = request("whole", tokens=2)
        whole.response_ids, whole.logprobs, whole.versions = [5, 6], [-1.0, -1.0], [whole.pinned_version or 0, 0]
        await rig.exchange(whole)
        (done,) = await rig.finish("whole")
        assert (done.token_ids, done.finish_reason) == ([5, 6], "length")
        assert rig.server.begun == []

    with_rig(scenario)


def test_an_aborted_request_ends_on_the_server_and_nothing_comes_back() -> None:
    async def scenario(rig: ServedRig) -> None:
        await rig.sync(0)
        await rig.exchange(request("unwanted", tokens=1000), request("wanted", tokens=50))
        await rig.clock.sleep(0.1)
        await rig.exchange(aborted=("unwanted",))
        assert rig.server.open == {"wanted"}
        await rig.finish("wanted")
        assert rig.completions.keys() == {"wanted"}

    with_rig(scenario)
