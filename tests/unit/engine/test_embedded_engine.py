"""The embedded engine against transformers itself: same tokens, same log-probs, whatever the batch does around them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from paceline.core.errors import ConfigError, VersionError
from paceline.core.sample import GenerationRequest
from paceline.engine import scheduler
from paceline.engine.embedded_engine import EmbeddedEngine
from tests.unit.engine.tiny_engines import (
    FAMILIES,
    MAX_MODEL_LEN,
    PLACES,
    VOCAB,
    WHOLE,
    config_of,
    drain,
    full_logits,
    greedy_truth,
    make_engine,
    make_model,
    prompts,
    request,
    steps,
)


@pytest.mark.parametrize("family", [*FAMILIES, *WHOLE])
def test_greedy_tokens_equal_generate_and_logprobs_a_full_forward(family: str, tmp_path: Path) -> None:
    model, engine = make_model(family, tmp_path), make_engine(tmp_path)
    engine.bind(model.state_dict(), 1)
    asked = [request(str(i), prompt, 5 + 3 * (i % 4)) for i, prompt in enumerate(prompts(2 * PLACES + 1))]
    engine.add(asked)
    made = drain(engine)
    for one in asked:
        tokens = made[one.request_id].token_ids
        assert tokens == greedy_truth(model, one.prompt_ids, one.params.max_tokens)
        truth = full_logits(model, one.prompt_ids, tokens).log_softmax(-1)
        expected = truth.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(made[one.request_id].logprobs), expected, atol=1e-4, rtol=0)
    assert len({tuple(completion.token_ids[:5]) for completion in made.values()}) > PLACES


@pytest.mark.parametrize("family", WHOLE)
def test_a_model_without_a_cache_of_ours_follows_a_swap_and_refuses_to_keep_one(family: str, tmp_path: Path) -> None:
    old, engine = make_model(family, tmp_path, seed=0), make_engine(tmp_path)
    new = make_model(family, tmp_path, seed=1)
    engine.bind(old.state_dict(), 1)
    engine.add([request("a", [3, 4, 5], 8)])
    for _ in range(3):
        engine.step()
    engine.bind(new.state_dict(), 2)
    made = drain(engine)["a"]
    before = greedy_truth(old, [3, 4, 5], 3)
    assert made.token_ids == before + greedy_truth(new, [3, 4, 5, *before], 5)
    assert made.versions == [1] * 3 + [2] * 5
    with pytest.raises(ConfigError, match="runs without a cache to keep"):
        make_engine(tmp_path, kv_cache="keep")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_weights_are_served_in_their_dtype(dtype: str, tmp_path: Path) -> None:
    model = make_model("qwen3", tmp_path).to(getattr(torch, dtype))
    engine = EmbeddedEngine(model_config_dir=str(tmp_path), dtype=dtype, max_num_seqs=2, max_model_len=20)
    engine.bind(model.state_dict(), 1)
    engine.add([request("a", [3, 4, 5], 4)])
    made = drain(engine)["a"]
    truth = full_logits(model, [3, 4, 5], made.token_ids).log_softmax(-1)
    expected = truth.gather(1, torch.tensor(made.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(made.logprobs), expected, atol=0.2, rtol=0.05)


@pytest.mark.parametrize("budget", [8, 24])
def test_prompts_split_over_passes_give_the_same(budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine = make_model("qwen3", tmp_path), make_engine(tmp_path, max_num_seqs=12)
    engine.bind(model.state_dict(), 1)
    monkeypatch.setattr(scheduler, "PREFILL_TOKENS", budget)
    asked = [request(str(i), prompt) for i, prompt in enumerate(prompts(12))]
    engine.add(asked)
    made = drain(engine)
    assert all(made[r.request_id].token_ids == greedy_truth(model, r.prompt_ids, 6) for r in asked)


def test_equal_prompts_are_computed_once_and_answered_alike(tmp_path: Path) -> None:
    model, engine = make_model("llama", tmp_path), make_engine(tmp_path)
    engine.bind(model.state_dict(), 1)
    seen: list[int] = []

    def count(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, nn.Embedding):
            seen.append(inputs[0].numel())

    engine.add([request(f"{i}", [5, 6, 7, 8, 9, 10]) for i in range(3)] + [request("other", [11, 12])])
    hook = register_module_forward_pre_hook(count)
    made = drain(engine)
    hook.remove()
    # Four newest tokens, one prompt of 5 for three sequences, one of 1.
    assert seen[0] == 4 + 5 + 1
    assert (
        made["0"].token_ids == made["1"].token_ids == made["2"].token_ids == greedy_truth(model, [5, 6, 7, 8, 9, 10], 6)
    )
    assert made["other"].token_ids == greedy_truth(model, [11, 12], 6)


def test_a_finished_place_is_taken_at_once(tmp_path: Path) -> None:
    model, engine = make_model("qwen3", tmp_path), make_engine(tmp_path, max_num_seqs=2)
    engine.bind(model.state_dict(), 1)
    engine.add([request("long", [3, 4], 9), request("a", [5, 6], 2), request("b", [7, 8], 3), request("c", [9], 2)])
    ended = {c.request_id: number for number, completions in enumerate(steps(engine), 1) for c in completions}
    assert ended == {"a": 2, "b": 5, "c": 7, "long": 9}


def test_stop_tokens_end_a_response_and_are_its_last_id(tmp_path: Path) -> None:
    model, engine = make_model("qwen3", tmp_path), make_engine(tmp_path)
    engine.bind(model.state_dict(), 1)
    truth = greedy_truth(model, [3, 4, 5], 10)
    stop = truth[4]
    engine.add(
        [
            request("one", [3, 4, 5], 10, stop_token_ids=(stop,)),
            request("many", [3, 4, 5], 10, stop_token_ids=(VOCAB - 1, truth[2], stop)),
            request("none", [3, 4, 5], 10),
            request("at the limit", [3, 4, 5], truth.index(stop) + 1, stop_token_ids=(stop,)),
        ]
    )
    made = drain(engine)
    assert (made["one"].token_ids, made["one"].finish_reason) == (truth[: truth.index(stop) + 1], "stop")
    first = min(truth.index(stop), truth.index(truth[2]))
    assert (made["many"].token_ids, made["many"].finish_reason) == (truth[: first + 1], "stop")
    assert (made["none"].token_ids, made["none"].finish_reason) == (truth, "length")
    assert made["at the limit"].finish_reason == "stop"


def test_stop_strings_end_a_response(tmp_path: Path) -> None:
    model = make_model("qwen3", tmp_path)
    engine = make_engine(tmp_path, decode=lambda ids: "".join(f"<{token}>" for token in ids))
    engine.bind(model.state_dict(), 1)
    truth = greedy_truth(model, [3, 4, 5], 10)
    text = f"{truth[2]}><{truth[3]}>"
    engine.add([request("text", [3, 4, 5], 10, stop=("never", text)), request("none", [3, 4, 5], 10)])
    made = drain(engine)
    assert (made["text"].token_ids, made["text"].finish_reason) == (truth[:4], "stop")
    assert made["none"].token_ids == truth


def test_a_continued_request_goes_on_where_it_was(tmp_path: Path) -> None:
    model, engine = make_model("gpt2", tmp_path), make_engine(tmp_path)
    engine.bind(model.state_dict(), 9)
    truth = greedy_truth(model, [3, 4, 5], 8)
    params = request("", [3], 8, stop_token_ids=(truth[5],)).params

    def carried(name: str, count: int) -> GenerationRequest:
        return GenerationRequest(name, [3, 4, 5], params, truth[:count], [-0.5] * count, [2] * count)

    engine.add([carried("three", 3), carried("stopped", 6)])
    made = drain(engine)
    end = truth.index(truth[5]) + 1
    assert (made["three"].token_ids, made["three"].finish_reason) == (truth[:end], "stop")
    assert made["three"].versions == [2] * 3 + [9] * (end - 3)
    assert made["three"].logprobs[:3] == [-0.5] * 3
    assert (made["stopped"].finish_reason, made["stopped"].versions) == ("stop", [2] * 6)
    assert engine.tokens_generated == end - 3


def test_steps_without_weights_are_refused(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    engine = make_engine(tmp_path)
    assert engine.step() == []
    engine.add([request("a", [3])])
    with pytest.raises(VersionError, match="no weights"):
        engine.step()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("bad", [3] * 30, MAX_MODEL_LEN - 29), "request bad needs 30 prompt tokens"),
        (request("bad", []), "empty prompt"),
        (request("bad", [VOCAB]), "outside the vocabulary"),
        (request("good", [3]), "in the engine already"),
        (request("bad", [3], stop=("x",)), "no decode function"),
        (GenerationRequest("bad", [3], request("", [3], 2).params, [4], [], []), "other numbers of log-probs"),
        (
            GenerationRequest("bad", [3], request("", [3], 2).params, [4] * 3, [0.0] * 3, [0] * 3),
            "more than max_tokens",
        ),
    ],
)
def test_a_request_that_cannot_run_is_refused_and_nothing_queued(
    bad: GenerationRequest, message: str, tmp_path: Path
) -> None:
    make_model("qwen3", tmp_path)
    engine = make_engine(tmp_path)
    with pytest.raises(ConfigError, match=message):
        engine.add([request("good", [3]), bad])
    assert (engine.waiting, engine.running) == (0, 0)


def test_a_pass_that_fails_is_repeated_from_known_state(tmp_path: Path) -> None:
    model, engine = make_model("qwen3", tmp_path), make_engine(tmp_path, kv_cache="keep")
    engine.bind(model.state_dict(), 1)
    engine.add([request("a", [3, 4, 5], 5)])
    engine.step()
    engine.add([request("b", [6, 7, 8], 5)])

    def fail(module: nn.Module, inputs: object) -> None:
        raise MemoryError

    hook = register_module_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        engine.step()
    hook.remove()
    made = drain(engine)
    assert made["a"].token_ids == greedy_truth(model, [3, 4, 5], 5)
    assert made["b"].token_ids == greedy_truth(model, [6, 7, 8], 5)


def test_models_that_cannot_be_served_are_refused(tmp_path: Path) -> None:
    config_of("qwen3").save_pretrained(tmp_path / "short")
    with pytest.raises(ConfigError, match="max_model_len 65 is more than the 64 positions"):
        make_engine(tmp_path / "short", max_model_len=65)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        make_engine(tmp_path / "absent")
    with pytest.raises(ConfigError, match="dtype int8"):
        EmbeddedEngine(model_config_dir=str(tmp_path / "short"), dtype="int8", max_num_seqs=1, max_model_len=8)
