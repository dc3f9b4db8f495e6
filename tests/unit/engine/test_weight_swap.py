"""Swaps in flight: each token is the bound version's own, under both KV policies; a refused binding changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.core.errors import CoverageError
from paceline.core.sample import Completion, GenerationRequest
from tests.unit.engine.tiny_engines import drain, full_logits, greedy_truth, make_engine, make_model, prompts, request

OLD, NEW = 4, 5


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_recompute_equals_a_fresh_start_under_the_new_weights(family: str, tmp_path: Path) -> None:
    old, new = make_model(family, tmp_path, seed=0), make_model(family, tmp_path, seed=1)
    engine = make_engine(tmp_path, kv_cache="recompute")
    engine.bind(old.state_dict(), OLD)
    asked = [request(str(i), prompt, 8) for i, prompt in enumerate(prompts(6))]
    engine.add(asked)
    early = [c for _ in range(3) for c in engine.step()]
    engine.bind(new.state_dict(), NEW)
    made = drain(engine)
    assert not early
    for index, one in enumerate(asked):
        tokens = made[one.request_id].token_ids
        before = 3 if index < 4 else 0
        assert made[one.request_id].versions == [OLD] * before + [NEW] * (8 - before)
        assert tokens[:before] == greedy_truth(old, one.prompt_ids, 8)[:before]
        assert tokens[before:] == greedy_truth(new, [*one.prompt_ids, *tokens[:before]], 8 - before)
        truth = full_logits(new, one.prompt_ids, tokens).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor(made[one.request_id].logprobs[before:]), truth[before:], atol=1e-4, rtol=0
        )


def test_keep_leaves_the_keys_and_values_of_the_old_weights(tmp_path: Path) -> None:
    old, new = make_model("llama", tmp_path, seed=0), make_model("llama", tmp_path, seed=1)

    def run(kv_cache: str) -> Completion:
        engine = make_engine(tmp_path, kv_cache="keep" if kv_cache == "keep" else "recompute")
        engine.bind(old.state_dict(), OLD)
        engine.add([request("a", [3, 4, 5, 6, 7], 8)])
        for _ in range(3):
            engine.step()
        engine.bind(new.state_dict(), NEW)
        return drain(engine)["a"]

    kept, recomputed = run("keep"), run("recompute")
    assert kept.versions == recomputed.versions == [OLD] * 3 + [NEW] * 5
    assert kept.token_ids[:3] == recomputed.token_ids[:3]
    # The first new token attends to old keys in one run and to new ones in the other.
    assert abs(kept.logprobs[3] - recomputed.logprobs[3]) > 1e-3
    # What follows the engine's own arithmetic: the old prefix's keys, the new weights for the newest token only.
    with torch.no_grad():
        past = old(torch.tensor([[3, 4, 5, 6, 7, *kept.token_ids[:2]]]), use_cache=True).past_key_values
        logits = new(torch.tensor([[kept.token_ids[2]]]), past_key_values=past).logits[0, -1]
    assert int(logits.argmax()) == kept.token_ids[3]
    assert abs(float(logits.log_softmax(-1).max()) - kept.logprobs[3]) < 1e-4


def test_the_engine_reads_the_bound_memory_itself(tmp_path: Path) -> None:
    model, engine = make_model("qwen3", tmp_path), make_engine(tmp_path)
    tensors = model.state_dict()
    engine.bind(tensors, OLD)
    served = engine.served_tensors()
    assert {name: tensor.data_ptr() for name, tensor in served.items()} == {
        name: tensor.data_ptr() for name, tensor in tensors.items()
    }
    assert served["lm_head.weight"].data_ptr() == served["model.embed_tokens.weight"].data_ptr()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    engine.add([request("a", [3, 4], 5, temperature=1.0)])
    drain(engine)
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)


def test_expected_tensors_name_every_alias(tmp_path: Path) -> None:
    model, engine = make_model("qwen3", tmp_path), make_engine(tmp_path)
    assert engine.expected_tensors() == {
        name: ("float32", tuple(tensor.shape)) for name, tensor in model.state_dict().items()
    }


def test_a_binding_that_does_not_fit_names_all_and_changes_nothing(tmp_path: Path) -> None:
    model, other = make_model("llama", tmp_path, seed=0), make_model("llama", tmp_path, seed=1)
    engine = make_engine(tmp_path)
    engine.bind(model.state_dict(), OLD)
    engine.add([request("a", [3, 4, 5], 6)])
    engine.step()
    wrong = dict(other.state_dict())
    wrong["model.norm.weight"] = wrong["model.norm.weight"].to(torch.bfloat16)
    wrong["lm_head.weight"] = wrong["lm_head.weight"][:-1]
    wrong["model.layers.0.mlp.up_proj.weight"] = wrong["model.layers.0.mlp.up_proj.weight"].T.contiguous().T
    del wrong["model.layers.1.mlp.up_proj.weight"]
    wrong["stranger"] = torch.zeros(1)
    with pytest.raises(CoverageError) as refusal:
        engine.bind(wrong, NEW)
    for part in (
        "model.norm.weight: bfloat16 (32,) instead of float32 (32,)",
        "lm_head.weight: float32 (59, 32) instead of float32 (60, 32)",
        "model.layers.0.mlp.up_proj.weight: strides (1, 48) are not row-major",
        "model.layers.1.mlp.up_proj.weight: missing",
        "stranger: not in the model",
    ):
        assert part in refusal.value.message
    assert engine.version == OLD
    made = drain(engine)["a"]
    assert (made.token_ids, made.versions) == (greedy_truth(model, [3, 4, 5], 6), [OLD] * 6)


def test_tied_names_must_share_memory(tmp_path: Path) -> None:
    model, engine = make_model("qwen3", tmp_path), make_engine(tmp_path)
    apart = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CoverageError, match=r"lm_head\.weight: tied to model\.embed_tokens\.weight"):
        engine.bind(apart, OLD)
    assert engine.version is None


def test_a_swap_before_a_continued_request_starts_uses_the_new_weights_only(tmp_path: Path) -> None:
    old, new = make_model("qwen3", tmp_path, seed=0), make_model("qwen3", tmp_path, seed=1)
    engine = make_engine(tmp_path, kv_cache="keep")
    engine.bind(old.state_dict(), OLD)
    engine.add([GenerationRequest("a", [3, 4], request("", [3], 6).params, [7, 8], [-1.0, -1.0], [OLD, OLD])])
    engine.bind(new.state_dict(), NEW)
    made = drain(engine)["a"]
    assert made.token_ids == [7, 8, *greedy_truth(new, [3, 4, 7, 8], 4)]
    assert made.versions == [OLD, OLD] + [NEW] * 4
