"""A vLLM server behind HTTP as an `InferenceServer`: what it is asked, what it answers, what is refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from paceline.core.errors import (
    ConfigError,
    CoverageError,
    DeadlineExceeded,
    DigestMismatch,
    PacelineError,
    SyncError,
    WorkerDied,
)
from paceline.core.sample import GenerationRequest, SamplingParams
from paceline.core.server_ports import TokenBatch
from paceline.core.version import Version
from paceline.engine import vllm_worker
from paceline.engine.vllm_commands import Hello
from paceline.engine.vllm_control import VllmWeights
from paceline.engine.vllm_http import VllmHttpServer
from paceline.runtime.system import SystemClock
from tests.unit.engine.fake_vllm_http import FakeVllm
from tests.unit.engine.vllm_rig import LAYERS, SPEC, Rig

PARAMS = SamplingParams(temperature=0.7, top_p=0.9, top_k=-1, max_tokens=6, stop_token_ids=(2,))
PATIENCE = 60.0  # seconds, for what comes at once
Scenario = Callable[[VllmHttpServer, FakeVllm, Rig], Awaitable[None]]


def driver_of(url: str, **options: object) -> VllmHttpServer:
    """With patience for everything; a test whose server does not answer says how little it needs."""
    clock = SystemClock()
    settings = {"start_seconds": PATIENCE, "call_seconds": PATIENCE, "wait_seconds": PATIENCE, **options}
    settings["hello"] = Hello(model_type="toy")
    return VllmHttpServer(
        url,
        name="replica-0",
        clock=clock,
        make_weights=lambda calls: VllmWeights(calls, name="replica-0", receiver=SPEC, clock=clock),
        **settings,  # type: ignore[arg-type]
    )


def with_server(scenario: Scenario, *, server_key: str = "", **options: object) -> None:
    async def main() -> None:
        rig = Rig()
        async with asyncio.timeout(PATIENCE), FakeVllm(rig.worker, api_key=server_key) as server:
            driver = driver_of(server.url, **options)
            try:
                await scenario(driver, server, rig)
            finally:
                await driver.close()

    asyncio.run(main())


async def batches_of(driver: VllmHttpServer, request: GenerationRequest) -> list[TokenBatch]:
    return [batch async for batch in driver.generate(request)]


def test_a_sync_over_http_is_proved_by_every_side() -> None:
    async def scenario(driver: VllmHttpServer, server: FakeVllm, rig: Rig) -> None:
        await driver.start()
        assert await driver.weight_version() is None
        manifests = [rig.publish(n, k=float(40 + n)) for n in range(3)]
        for n, manifest in enumerate(manifests):
            held = await driver.stage(manifest, SystemClock().wall() + PATIENCE)
            assert (held.digest, held.bytes, held.base_version) == (manifest.digest, manifest.total_bytes, None)
            assert await driver.pause(SystemClock().wall() + PATIENCE) == 0
            assert server.paused is not None
            await driver.load(manifest.version)
            await driver.confirm(manifest.version, manifest.digest)
            await driver.resume()
            assert not server.paused
            assert await driver.weight_version() == Version(1, n).packed
        assert rig.model.loads == [set(LAYERS), {"q", "k", "v"}, {"q", "k", "v"}]
        with pytest.raises(DigestMismatch):
            await driver.confirm(manifests[-1].version, "0" * 32)
        server.label = "default"
        with pytest.raises(DigestMismatch, match="weights of its own"):
            await driver.confirm(manifests[-1].version, manifests[-1].digest)

    with_server(scenario)


def test_token_ids_go_in_and_come_out() -> None:
    async def scenario(driver: VllmHttpServer, server: FakeVllm, rig: Rig) -> None:
        await driver.start()
        server.label = "1.4"
        request = GenerationRequest("r", [1, 2, 3], PARAMS, response_ids=[4], logprobs=[-0.1], versions=[0])
        batches = await batches_of(driver, request)
        assert [batch.token_ids for batch in batches] == [[10], [11], [12], [13], [14]]
        assert [batch.logprobs for batch in batches] == [[-0.0], [-0.5], [-1.0], [-1.5], [-2.0]]
        assert batches[-1].finish_reason == "length"
        (asked,) = server.asked
        assert asked["prompt"] == [1, 2, 3, 4]
        assert (asked["max_tokens"], asked["temperature"], asked["top_p"]) == (5, 0.7, 0.9)
        assert (asked["stop_token_ids"], asked["ignore_eos"]) == ([2], True)

    with_server(scenario)


def test_requests_of_others_that_do_not_end_are_frozen_and_counted() -> None:
    async def scenario(driver: VllmHttpServer, server: FakeVllm, rig: Rig) -> None:
        await driver.start()
        server.wait_seconds = 600.0
        assert await driver.pause(SystemClock().wall() + PATIENCE) == 3
        assert server.calls[-1].startswith("POST /pause?mode=keep")

    with_server(scenario, wait_seconds=0.2)


@pytest.mark.parametrize(
    ("misbehave", "kind", "complaint"),
    [
        ({"/weight_info": (404, "{}")}, ConfigError, "VLLM_SERVER_DEV_MODE=1"),
        (
            {"/init_weight_transfer_engine": (500, "Weight transfer not configured.")},
            ConfigError,
            "--weight-transfer-config",
        ),
        (
            {"/init_weight_transfer_engine": (500, "[paceline:ConfigError] the server's paceline speaks protocol 9")},
            ConfigError,
            "speaks protocol 9",
        ),
        ({"/health": (500, "")}, WorkerDied, "answers 500"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_with_what_to_do(
    misbehave: dict[str, tuple[int, str]], kind: type[PacelineError], complaint: str
) -> None:
    async def scenario(driver: VllmHttpServer, server: FakeVllm, rig: Rig) -> None:
        server.misbehave = misbehave
        with pytest.raises(kind, match=complaint) as refused:
            await driver.start()
        assert server.url in refused.value.message

    with_server(scenario, start_seconds=0.0)


def test_another_model_is_refused_by_name() -> None:
    async def main() -> None:
        rig = Rig()
        async with FakeVllm(rig.worker) as server:
            driver = VllmHttpServer(
                server.url,
                name="replica-0",
                clock=SystemClock(),
                make_weights=lambda calls: VllmWeights(calls, name="r", receiver=SPEC, clock=SystemClock()),
                hello=Hello(model_type="llama"),
            )
            with pytest.raises(ConfigError, match="model_type toy, but this run needs llama"):
                await driver.start()
            await driver.close()

    asyncio.run(main())


@pytest.mark.parametrize(("sends", "works"), [("secret", True), ("wrong", False), (None, False)])
def test_the_api_key_is_sent(sends: str | None, works: bool) -> None:
    async def scenario(driver: VllmHttpServer, server: FakeVllm, rig: Rig) -> None:
        if works:
            await driver.start()
            return
        with pytest.raises(ConfigError, match=r"refuses the API key \(401\): set it .*rollout\.server_api_key_env"):
            await driver.start()

    with_server(scenario, server_key="secret", api_key=sends)


def test_a_server_that_takes_shorter_requests_is_refused_with_both_lengths() -> None:
    async def scenario(driver: VllmHttpServer, server: FakeVllm, rig: Rig) -> None:
        server.max_model_len = 100
        needs_more = driver_of(server.url, max_model_len=101)
        with pytest.raises(ConfigError, match=r"takes 100 tokens .* needs 101: start it with --max-model-len 101"):
            await needs_more.start()
        await needs_more.close()
        needs_all = driver_of(server.url, max_model_len=100)
        await needs_all.start()
        await needs_all.close()

    with_server(scenario)


def test_a_server_on_another_host_is_refused_where_weights_lie_in_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_worker, "host_id", lambda: "elsewhere")

    async def scenario(driver: VllmHttpServer, server: FakeVllm, rig: Rig) -> None:
        with pytest.raises(ConfigError, match=r"http://127.*another host .* checkpoint_engine\.backend=filesystem"):
            await driver.start()

    with_server(scenario)


@pytest.mark.parametrize(
    ("path", "call"),
    [
        ("/pause", lambda driver: driver.pause(SystemClock().wall() + PATIENCE)),
        ("/start_weight_update", lambda driver: driver.load(1)),
        ("/weight_info", lambda driver: driver.weight_version()),
        ("/resume", lambda driver: driver.resume()),
    ],
)
def test_a_route_that_is_gone_is_named_with_what_to_do(
    path: str, call: Callable[[VllmHttpServer], Awaitable[object]]
) -> None:
    async def scenario(driver: VllmHttpServer, server: FakeVllm, rig: Rig) -> None:
        await driver.start()
        server.misbehave = {path: (404, "Not Found")}
        with pytest.raises(SyncError, match=rf"answers 404 to {path}.*VLLM_SERVER_DEV_MODE=1") as refused:
            await call(driver)
        assert server.url in refused.value.message

    with_server(scenario)


def test_stop_strings_are_refused_in_one_line() -> None:
    async def scenario(driver: VllmHttpServer, server: FakeVllm, rig: Rig) -> None:
        await driver.start()
        params = msgspec.structs.replace(PARAMS, stop=("end",))
        with pytest.raises(ConfigError, match=r"request r has stop strings.*use stop_token_ids"):
            await batches_of(driver, GenerationRequest("r", [1], params))
        assert server.asked == []

    with_server(scenario)


def test_errors_of_the_plug_in_keep_their_class() -> None:
    async def scenario(driver: VllmHttpServer, server: FakeVllm, rig: Rig) -> None:
        await driver.start()
        manifest = rig.publish(0)
        await driver.stage(manifest, SystemClock().wall() + PATIENCE)
        rig.model.fail_after = 1
        with pytest.raises(CoverageError, match="refuses the rest"):
            await driver.load(manifest.version)
        assert server.label == "default", "the label is set after the load"
        with pytest.raises(SyncError, match="not held"):
            await driver.load(Version(1, 9).packed)

    with_server(scenario)


def test_a_load_that_failed_on_one_worker_of_several_can_be_undone() -> None:
    async def scenario(driver: VllmHttpServer, server: FakeVllm, rig: Rig) -> None:
        await driver.start()
        first, second = rig.publish(0), rig.publish(1, q=5.0)
        for manifest in (first, second):
            await driver.stage(manifest, SystemClock().wall() + PATIENCE)
        await driver.load(first.version)
        await driver.confirm(first.version, first.digest)
        server.another_worker_loaded = True
        rig.model.fail_once_after = 1
        with pytest.raises(CoverageError, match="refuses the rest"):
            await driver.load(second.version)
        assert await driver.weight_version() is None
        await driver.load(first.version)
        await driver.confirm(first.version, first.digest)

    with_server(scenario)


def test_a_server_that_dies_or_hangs_is_named() -> None:
    async def scenario(driver: VllmHttpServer, server: FakeVllm, rig: Rig) -> None:
        await driver.start()
        server.hangs = {"/resume"}
        with pytest.raises(DeadlineExceeded, match="did not answer /resume") as hanging:
            await driver.resume()
        assert server.url in hanging.value.culprit
        server.cut_streams = True
        with pytest.raises(WorkerDied, match=r"ended a stream without saying how|went away"):
            await batches_of(driver, GenerationRequest("r", [1], PARAMS))
        await server.__aexit__()
        with pytest.raises(WorkerDied, match="went away"):
            await driver.weight_version()

    with_server(scenario, call_seconds=2.0)


def test_a_request_that_is_refused_is_a_fault_of_the_request() -> None:
    async def scenario(driver: VllmHttpServer, server: FakeVllm, rig: Rig) -> None:
        await driver.start()
        server.misbehave = {"/v1/completions": (400, "prompt is too long")}
        with pytest.raises(ConfigError, match="prompt is too long"):
            await batches_of(driver, GenerationRequest("r", [1], PARAMS))

    with_server(scenario)


def test_nothing_answers_at_a_wrong_url() -> None:
    async def main() -> None:
        driver = driver_of("http://127.0.0.1:9", start_seconds=0.0)
        with pytest.raises(WorkerDied, match="is the server running, and is the URL right"):
            await driver.start()
        await driver.close()

    asyncio.run(main())
