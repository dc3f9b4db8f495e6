"""A trainer of any kind pushes its weights to servers: all verified, one after another, or named."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.errors import CoverageError, SyncError, WorkerDied
from paceline.engine.vllm_commands import Took
from paceline.engine.vllm_worker import WorkerWeights
from paceline.runtime.vllm_plugin import make_receiver
from paceline.runtime.vllm_push import VllmPusher
from tests.unit.engine.fake_vllm_http import FakeVllm, listening
from tests.unit.engine.vllm_rig import LAYERS, DictModel, Rig


def test_every_server_serves_what_was_pushed() -> None:
    async def main() -> None:
        rig, model = Rig(), DictModel()
        other = WorkerWeights(loader=model, make_receiver=rig.make_receiver)
        async with FakeVllm(rig.worker) as one, FakeVllm(other) as two:
            pusher = VllmPusher([one.url, two.url])
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
            pusher = VllmPusher([server.url])
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


def test_a_server_that_does_not_pause_goes_on_with_what_it_served() -> None:
    async def main() -> None:
        rig = Rig()
        async with FakeVllm(rig.worker) as server:
            pusher = VllmPusher([server.url])
            await pusher.push_async(rig.publish(0))
            server.misbehave = {"/pause": (500, "no")}
            with pytest.raises(SyncError, match=rf"{server.url}.*answers 500 to /pause"):
                await pusher.push_async(rig.publish(1, q=3.0))
            assert server.calls[-1] == "POST /resume"
            assert server.label == "1.0"

    asyncio.run(main())


def test_a_server_that_is_not_there_is_named() -> None:
    rig = Rig()
    pusher = VllmPusher(["http://127.0.0.1:9"], start_seconds=0.0)
    with pytest.raises(WorkerDied, match=r"http://127\.0\.0\.1:9"):
        pusher.push(rig.publish(0))


GUIDE = Path(__file__).parents[3] / "docs/vllm.md"


def examples() -> tuple[str, str]:
    """What the guide shows for a server on this host, and what it has instead for one elsewhere."""
    here, elsewhere = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    return here, elsewhere


def run_example(text: str, server: FakeVllm, directory: Path) -> torch.nn.Module:
    """Run it with a model of ours that changes a little in each step, a server and places of the test's."""
    model = torch.nn.Module()
    for name in LAYERS:
        model.register_parameter(name, torch.nn.Parameter(torch.randn(4000)))

    def train() -> None:
        with torch.no_grad():
            model.get_parameter("q")[:7] += 1.0

    text = re.sub(r"^model = .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"http://[\d.]+:8000", server.url, text).replace("...  # train", "train()")
    text = text.replace("/mnt/weights", str(directory / "weights")).replace('"/tmp"', repr(str(directory)))
    names: dict[str, Any] = {"model": model, "train": train}
    exec(compile(text, str(GUIDE), "exec"), names)
    names["sender"].close()
    return model


def test_the_example_of_the_guide_has_ten_lines_and_loads_what_changed(tmp_path: Path) -> None:
    here, _ = examples()
    assert len([line for line in here.splitlines() if line.strip()]) <= 10
    toy = DictModel()
    toy.writes_in_place = True
    worker = WorkerWeights(loader=toy, make_receiver=make_receiver)
    with listening(worker) as server:
        model = run_example(here, server, tmp_path)
        assert server.label == "0.3"
        assert torch.equal(toy.weights["q"], model.get_parameter("q"))
        assert toy.loads == [set(LAYERS)], "the first version whole"
        assert toy.written == [7, 7], "of those after it the elements that changed"
        worker.close()


def test_the_example_for_servers_elsewhere_sends_deltas(tmp_path: Path) -> None:
    here, elsewhere = examples()
    loop = here[here.index("for version") :]
    toy = DictModel()
    worker = WorkerWeights(loader=toy, make_receiver=make_receiver)
    with listening(worker) as server:
        model = run_example(elsewhere + loop, server, tmp_path)
        assert server.label == "0.3"
        assert torch.equal(toy.weights["q"], model.get_parameter("q"))
        assert toy.loads == [set(LAYERS), {"q", "k", "v"}, {"q", "k", "v"}]
        worker.obey(Took(3, 2))
        with pytest.raises(SyncError):
            worker.obey(Took(3, 1))
        worker.close()
