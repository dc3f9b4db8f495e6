"""A trainer of any kind pushes its weights to servers: all verified, one after another, or named."""

from __future__ import annotations

import asyncio

import pytest

from paceline.core.errors import CoverageError, WorkerDied
from paceline.engine.vllm_worker import WorkerWeights
from paceline.runtime.vllm_push import VllmPusher
from tests.unit.engine.fake_vllm_http import FakeVllm
from tests.unit.engine.vllm_rig import LAYERS, DictModel, Rig


def test_every_server_serves_what_was_pushed() -> None:
    async def main() -> None:
        rig, model = Rig(), DictModel()
        other = WorkerWeights(loader=model, make_receiver=rig.make_receiver)
        async with FakeVllm(rig.worker) as one, FakeVllm(other) as two:
            pusher = VllmPusher([one.url, two.url], wait_seconds=0.2)
            for n in range(3):
                manifest = rig.publish(n, q=float(20 + n))
                pauses = await pusher.push_async(manifest)
                assert pauses.keys() == {one.url, two.url}
                assert one.label == two.label == f"1.{n}"
                assert one.paused is two.paused is None
                assert rig.model.weights["q"].tolist() == model.weights["q"].tolist() == [20.0 + n] * 4

    asyncio.run(main())


def test_a_server_that_refuses_keeps_what_it_served_and_is_named() -> None:
    async def main() -> None:
        rig = Rig()
        async with FakeVllm(rig.worker) as server:
            pusher = VllmPusher([server.url], wait_seconds=0.2)
            await pusher.push_async(rig.publish(0))
            manifest = rig.publish(1, q=30.0, norm=31.0)
            rig.model.fail_once_after = 2
            with pytest.raises(CoverageError, match="refuses the rest"):
                await pusher.push_async(manifest)
            assert server.label == "1.0"
            assert server.paused is None
            assert rig.model.loads[-1] == set(LAYERS)
            assert rig.model.weights["q"].tolist() == [0.0] * 4
            await pusher.push_async(manifest)
            assert server.label == "1.1"

    asyncio.run(main())


def test_a_server_that_is_not_there_is_named() -> None:
    rig = Rig()
    pusher = VllmPusher(["http://127.0.0.1:9"], start_seconds=0.2)
    with pytest.raises(WorkerDied, match=r"http://127\.0\.0\.1:9"):
        pusher.push(rig.publish(0))
