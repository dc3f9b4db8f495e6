"""Requests of others on a server of theirs: they get time to end before a swap, then they are cut and on record."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2

from paceline.core.events import ForeignRequestsMixed
from tests.vllm.fleet import Fleet, prompt

TOKENS = 48


async def _foreign(fleet: Fleet) -> dict[str, Any]:
    body = {"prompt": prompt(1), "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True, "top_k": 0}
    async with httpx2.AsyncClient(timeout=120, trust_env=False) as client:
        answer = await client.post(f"{fleet.server.url}/v1/completions", json=body)
    assert answer.status_code == 200
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def test_what_does_not_end_in_time_goes_on_and_is_on_record(fleet: Fleet) -> None:
    async def scenario(at_once: int) -> list[dict[str, Any]]:
        await fleet.meet_server_again(wait_seconds=0.05)  # less than a response takes
        asking = [asyncio.ensure_future(_foreign(fleet)) for _ in range(at_once)]
        manifest = fleet.publish(fleet.changed_weights(0.05))
        await asyncio.sleep(0.1)
        report = await fleet.bring(fleet.replicas[2], manifest)
        assert report.digest == manifest.digest
        for replica in fleet.replicas[:2]:
            await fleet.bring(replica, manifest)
        answers = list(await asyncio.gather(*asking))
        await fleet.meet_server_again()
        await fleet.sync(fleet.changed_weights(0.05))
        return answers

    before = len(fleet.events.of(ForeignRequestsMixed))
    answers = fleet.run(scenario(24))
    assert {answer["finish_reason"] for answer in answers} == {"length"}
    assert {len(answer["token_ids"]) for answer in answers} == {TOKENS}
    (mixed,) = fleet.events.of(ForeignRequestsMixed)[before:]
    assert mixed.replica == "replica-2"
    assert 1 <= mixed.requests <= 24
