"""Requests of others on a server of theirs: they get time to end before a swap, then they are cut and on record."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx2

from paceline.core.events import ForeignRequestsMixed
from tests.vllm.fleet import Fleet, prompt

LONG = 400  # tokens: seconds of work


async def _foreign(fleet: Fleet, tokens: int) -> dict[str, Any]:
    body = {"prompt": prompt(1), "max_tokens": tokens, "ignore_eos": True, "return_token_ids": True, "top_k": 0}
    async with httpx2.AsyncClient(timeout=120, trust_env=False) as client:
        answer = await client.post(f"{fleet.server.url}/v1/completions", json=body)
    assert answer.status_code == 200
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


async def _until_asked(fleet: Fleet) -> None:
    """Return once the server works on a request."""
    async with httpx2.AsyncClient(timeout=120, trust_env=False) as client:
        while True:
            metrics = (await client.get(f"{fleet.server.url}/metrics")).text
            if re.search(r"^vllm:num_requests_running\{[^}]*\} [1-9]", metrics, re.MULTILINE):
                return
            await asyncio.sleep(0.01)


async def _sync_beside(fleet: Fleet, *, wait_seconds: float, tokens: int, at_once: int) -> list[dict[str, Any]]:
    """What others got for the requests that ran on the server while it was brought to the next version."""
    await fleet.meet_server_again(wait_seconds=wait_seconds)
    asking = [asyncio.ensure_future(_foreign(fleet, tokens)) for _ in range(at_once)]
    manifest = fleet.publish(fleet.changed_weights(0.05))
    await _until_asked(fleet)
    report = await fleet.bring(fleet.replicas[2], manifest)
    assert report.digest == manifest.digest
    for replica in fleet.replicas[:2]:
        await fleet.bring(replica, manifest)
    answers = list(await asyncio.gather(*asking))
    await fleet.meet_server_again()
    await fleet.sync(fleet.changed_weights(0.05))
    return answers


def _check(answers: list[dict[str, Any]], tokens: int) -> None:
    assert {answer["finish_reason"] for answer in answers} == {"length"}
    assert {len(answer["token_ids"]) for answer in answers} == {tokens}


def test_what_does_not_end_in_time_goes_on_and_is_on_record(fleet: Fleet) -> None:
    before = len(fleet.events.of(ForeignRequestsMixed))
    answers = fleet.run(_sync_beside(fleet, wait_seconds=0.05, tokens=LONG, at_once=24))
    _check(answers, LONG)
    (mixed,) = fleet.events.of(ForeignRequestsMixed)[before:]
    assert mixed.replica == "replica-2"
    assert 1 <= mixed.requests <= 24


def test_what_ends_in_time_is_of_one_version(fleet: Fleet) -> None:
    before = len(fleet.events.of(ForeignRequestsMixed))
    _check(fleet.run(_sync_beside(fleet, wait_seconds=60.0, tokens=LONG, at_once=8)), LONG)
    assert fleet.events.of(ForeignRequestsMixed)[before:] == []
