"""Sampling against a naive reference, one row at a time in plain Python."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.core.sample import SamplingParams
from paceline.engine.sampling import SamplingPlan, plan_sampling, sample
from tests.unit.engine.tiny_engines import VOCAB, drain, full_logits, greedy_truth, make_engine, make_model, request

CPU = torch.device("cpu")


def reference(logits: list[float], temperature: float, top_p: float, top_k: int) -> dict[int, float]:
    """Token -> probability of the distribution that is sampled from."""
    scaled = [value / temperature for value in logits]
    best = max(scaled)
    weights = {token: math.exp(value - best) for token, value in enumerate(scaled)}
    order = sorted(weights, key=lambda token: -weights[token])
    kept = order[:top_k] if top_k > 0 else order
    total = sum(weights[token] for token in kept)
    nucleus, mass = [], 0.0
    for token in kept:
        nucleus.append(token)
        mass += weights[token] / total
        if mass >= top_p:
            break
    total = sum(weights[token] for token in nucleus)
    return {token: weights[token] / total for token in nucleus}


SETTINGS = [
    (1.0, 1.0, -1),
    (0.7, 1.0, -1),
    (1.0, 0.8, -1),
    (1.3, 1.0, 3),
    (0.9, 0.6, 5),
    (2.0, 0.95, 1),
    (1.0, 0.01, -1),
]


def plan(settings: list[tuple[float, float, int]]) -> SamplingPlan:
    temperature, top_p, top_k = zip(*settings, strict=True)
    return plan_sampling(
        np.asarray(temperature, np.float32), np.asarray(top_p, np.float32), np.asarray(top_k, np.int64), CPU
    )


def test_draws_and_logprobs_follow_each_rows_distribution() -> None:
    draws = 4000
    logits = torch.randn(len(SETTINGS), 12, generator=torch.Generator().manual_seed(3)) * 2
    batch = logits.repeat_interleave(draws, dim=0)
    rows = [setting for setting in SETTINGS for _ in range(draws)]
    tokens, logprobs = sample(batch, plan(rows), torch.Generator().manual_seed(0))
    for index, setting in enumerate(SETTINGS):
        expected = reference(logits[index].tolist(), *setting)
        mine = tokens[index * draws : (index + 1) * draws].tolist()
        assert set(mine) <= set(expected)
        for token, logprob in zip(mine[:200], logprobs[index * draws :][:200].tolist(), strict=True):
            assert logprob == pytest.approx(math.log(expected[token]), abs=1e-4)
        for token, probability in expected.items():
            spread = 5 * math.sqrt(probability * (1 - probability) / draws)
            assert abs(mine.count(token) / draws - probability) <= spread + 1e-4


def test_greedy_rows_report_the_logprob_at_temperature_one() -> None:
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(3))
    settings = [(0.0, 0.5, 2), (1.0, 1.0, 2), (0.0, 1.0, -1)]
    for chosen in (settings, [settings[0], settings[2], settings[2]]):
        tokens, logprobs = sample(logits, plan(chosen), torch.Generator().manual_seed(0))
        for row in (0, 2) if chosen is settings else (0, 1, 2):
            assert int(tokens[row]) == int(logits[row].argmax())
            assert float(logprobs[row]) == pytest.approx(float(logits[row].log_softmax(-1).max()), abs=1e-6)


def test_a_token_of_no_probability_is_never_drawn() -> None:
    logits = torch.full((5000, 4), -torch.inf)
    logits[:, 1] = logits[:, 2] = 0.0
    tokens, logprobs = sample(logits, plan([(1.0, 1.0, -1)] * 5000), torch.Generator().manual_seed(1))
    assert set(tokens.tolist()) == {1, 2}
    torch.testing.assert_close(logprobs, torch.full((5000,), -math.log(2)))


def test_mixed_requests_in_one_batch_keep_their_own_settings(tmp_path: Path) -> None:
    model, engine = make_model("qwen3", tmp_path), make_engine(tmp_path, max_num_seqs=3)
    engine.bind(model.state_dict(), 1)
    settings = [(0.0, 1.0, -1), (1.0, 1.0, -1), (0.8, 1.0, 2), (1.0, 0.5, -1), (1.2, 0.9, 4), (0.0, 0.5, 3)]
    params = [SamplingParams(t, p, k, 6 + i, ()) for i, (t, p, k) in enumerate(settings)]
    asked = [request(str(i), [3, 4 + i], p.max_tokens, temperature=p.temperature, top_p=p.top_p, top_k=p.top_k)
             for i, p in enumerate(params)]  # fmt: skip
    engine.add(asked)
    made = drain(engine)
    for one in asked:
        done = made[one.request_id]
        logits = full_logits(model, one.prompt_ids, done.token_ids)
        temperature, top_p, top_k = one.params.temperature, one.params.top_p, one.params.top_k
        if temperature == 0:
            assert done.token_ids == greedy_truth(model, one.prompt_ids, one.params.max_tokens)
            continue
        for row, token, logprob in zip(logits.tolist(), done.token_ids, done.logprobs, strict=True):
            assert logprob == pytest.approx(math.log(reference(row, temperature, top_p, top_k)[token]), abs=1e-4)


def test_a_seed_fixes_the_tokens(tmp_path: Path) -> None:
    model = make_model("qwen3", tmp_path)

    def run(seed: int) -> list[list[int]]:
        engine = make_engine(tmp_path, seed=seed)
        engine.bind(model.state_dict(), 1)
        engine.add([request(str(i), [3, 4, 5], 8, temperature=1.0) for i in range(6)])
        made = drain(engine)
        return [made[str(i)].token_ids for i in range(6)]

    first = run(7)
    assert first == run(7)
    assert first != run(8)
    assert len({tuple(tokens) for tokens in first}) > 1
    assert all(0 <= token < VOCAB for tokens in first for token in tokens)
