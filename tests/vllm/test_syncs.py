"""Twenty syncs under continuous generation: proved each time, every token by the version it names, no old cache."""

from __future__ import annotations

import asyncio

import pytest

from paceline.core.sample import Completion, GenerationRequest, SamplingParams
from paceline.core.version import Version
from tests.vllm.fleet import LIFE, TEMPERATURE, Client, Fleet, prompt, shipped_model
from tests.vllm.trainer_logprobs import TrainerModel

SYNCS = 20
CLOSE = 1e-3  # the most that a log-prob may differ from the trainer's, in float32
CHANGES = ("", "layers.0.self_attn", "norm", "embed", "layers.1.mlp")


@pytest.fixture(scope="module")
def clients(fleet: Fleet) -> list[Client]:
    """What twenty syncs left; each sync is checked as it happens."""
    clients = [Client(replica, at_once=6, tokens=40) for replica in fleet.replicas]
    fleet.run(_twenty_syncs(fleet, clients), 400.0)
    return clients


async def _twenty_syncs(fleet: Fleet, clients: list[Client]) -> None:
    asking = [asyncio.ensure_future(client.run()) for client in clients]
    await asyncio.gather(*(client.more(2) for client in clients))
    for turn in range(SYNCS):
        manifest, reports = await fleet.sync(fleet.changed_weights(0.05, CHANGES[turn % len(CHANGES)]))
        assert {report.digest for report in reports} == {manifest.digest}
        assert {await port.weight_version() for port in fleet.ports} == {manifest.version}
        sums = [await port.checksums() for port in fleet.ports]
        assert sums[0] == sums[1], "loading the layers that changed gives what loading everything gives"
        assert sums[2] == sums[1]
        await asyncio.gather(*(client.more(2) for client in clients))
    for client in clients:
        client.stopping = True
    await asyncio.gather(*asking)


def test_every_request_ends_once_and_whole(clients: list[Client]) -> None:
    for client in clients:
        assert len(client.done) > 20
        for completion in client.done.values():
            assert completion.finish_reason == "length"
            assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions) >= 8
            assert completion.versions == sorted(completion.versions)


def test_requests_in_flight_go_on_over_a_sync(clients: list[Client]) -> None:
    for client in clients:
        assert sum(len(set(completion.versions)) > 1 for completion in client.done.values()) >= 5


def test_each_token_has_the_log_prob_that_the_trainer_computes_for_its_version(
    fleet: Fleet, clients: list[Client]
) -> None:
    model = TrainerModel(shipped_model())
    worst, far, seen = 0.0, 0, 0
    for n in range(SYNCS + 1):
        model.load(fleet.versions[n])
        version = Version(LIFE, n).packed
        for client in clients:
            mine = [done for done in client.done.values() if version in done.versions]
            for done in mine[:6]:
                right = model.logprobs(client.prompts[done.request_id], done.token_ids, TEMPERATURE)
                pairs = list(zip(done.logprobs, right, done.versions, strict=True))
                worst = max([worst, *(abs(a - b) for a, b, made in pairs if made == version)])
                far += sum(abs(a - b) > 10 * CLOSE for a, b, made in pairs if made != version)
                seen += sum(made == version for _, _, made in pairs)
    assert seen > 1000
    assert worst <= CLOSE
    assert far > 200, "other versions have other log-probs, so this test can tell them apart"


def test_no_old_block_of_the_prefix_cache_serves_a_new_request(fleet: Fleet, clients: list[Client]) -> None:
    model = TrainerModel(shipped_model())
    params = SamplingParams(temperature=TEMPERATURE, top_p=1.0, top_k=-1, max_tokens=4, stop_token_ids=())

    async def one(name: str) -> list[Completion]:
        made = []
        for index, port in enumerate(fleet.ports):
            request = GenerationRequest(f"{name}-{index}", prompt(0), params)
            batches = [batch async for batch in port.generate(request)]
            ids = [token for batch in batches for token in batch.token_ids]
            made.append(Completion(name, ids, [x for batch in batches for x in batch.logprobs], [], "length"))
        return made

    async def around_a_sync() -> tuple[list[Completion], list[Completion], list[Completion]]:
        cold, warm = await one("cold"), await one("warm")
        await fleet.sync(fleet.changed_weights(0.3))
        return cold, warm, await one("after")

    cold, warm, after = fleet.run(around_a_sync())
    for n, made in ((fleet.newest - 1, cold), (fleet.newest - 1, warm), (fleet.newest, after)):
        model.load(fleet.versions[n])
        for completion in made:
            right = model.logprobs(prompt(0), completion.token_ids, TEMPERATURE)
            assert completion.logprobs == pytest.approx(right, abs=CLOSE)
    model.load(fleet.versions[fleet.newest - 1])
    for completion in after:
        old = model.logprobs(prompt(0), completion.token_ids, TEMPERATURE)
        assert completion.logprobs != pytest.approx(old, abs=10 * CLOSE)
