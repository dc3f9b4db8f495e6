"""Models that cannot be trained, learning keys that exclude each other, clusters that are not there: exit code 2, one
line with what to do, nothing heavy imported, nothing started.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.core.config import Config
from paceline.runtime.registry import model_path
from tests.unit.cli.test_refusals import Answer, run

CORRECTION = "algorithm.rollout_correction"
REFUSALS = [
    (["model.path=bert"], "holds a BertForMaskedLM, which is no causal LM"),
    (["model.path=quantized"], "is quantized; training needs float32, float16 or bfloat16 weights"),
    (["model.path=pickled"], "has no *.safetensors file; save it again with save_pretrained"),
    (["model.path=shards"], "lacks model-00002-of-00002.safetensors, which its model.safetensors.index.json names"),
    (["model.path=broken"], "model.path: cannot read "),
    (["model.path=tokenless"], "tokenizer.json is missing; save the model's fast tokenizer there"),
    (["model.path=short"], "allow 24 tokens together, but the model of model.path="),
    (["model.path=endless"], "names no eos_token_id: a response would never end"),
    (["actor.policy_loss.loss_mode=gspo"], "set actor.loss_agg_mode=seq-mean-token-mean"),
    (["actor.policy_loss.loss_mode=reinforce"], "actor.policy_loss.loss_mode: "),
    (["actor.loss_agg_mode=seq-mean-token-sum-norm"], "needs actor.loss_scale_factor"),
    (["actor.kl_loss_type=k9"], "actor.kl_loss_type: "),
    (["actor.clip_ratio_c=0.5"], "actor.clip_ratio_c: "),
    (["algorithm.adv_estimator=gae"], "algorithm.adv_estimator: "),
    ([f"{CORRECTION}.rollout_is=token"], "rollout_is=token needs bypass_mode=false"),
    (
        [f"{CORRECTION}.rollout_rs=token", f"{CORRECTION}.rollout_rs_threshold=0.5"],
        "rollout_rs_threshold_lower has to be less than rollout_rs_threshold",
    ),
    (
        ["reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=9"],
        "reward.overlong_buffer.len=9 is more than data.max_response_length=8",
    ),
    (["ray.address=cluster"], "address=cluster has to be auto or host:port"),
    (
        ["ray.address=127.0.0.1:1"],
        "no Ray cluster answers at 127.0.0.1:1 (Connection refused); start one with ray start",
    ),
    (["ray.address=auto"], "ray.address=auto: no Ray cluster runs on this machine; start one with ray start --head"),
    (
        ["actor_rollout_ref.actor.use_kl_loss=true"],
        "verl's actor_rollout_ref.actor.use_kl_loss is actor.use_kl_loss here",
    ),
    (["actor_rollout_ref.actor.ppo_epochs=2"], "is unsupported here: each batch is used once"),
]


def write_model(directory: Path, settings: Mapping[str, Any], *left_out: str) -> None:
    """The shipped model with other settings, and without some of its files."""
    shipped = model_path(Config())
    directory.mkdir()
    for file in shipped.iterdir():
        if file.name not in ("config.json", *left_out):
            (directory / file.name).symlink_to(file)
    plain = json.loads((shipped / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps(plain | dict(settings)), encoding="utf-8")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    directory = tmp_path_factory.mktemp("refusals")
    write_model(directory / "bert", {"architectures": ["BertForMaskedLM"]})
    write_model(directory / "quantized", {"quantization_config": {"bits": 4}})
    write_model(directory / "pickled", {}, "model.safetensors")
    (directory / "pickled" / "pytorch_model.bin").touch()
    write_model(directory / "shards", {}, "model.safetensors")
    (directory / "shards" / "model-00001-of-00002.safetensors").touch()
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = json.dumps({"weight_map": names})
    (directory / "shards" / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    write_model(directory / "tokenless", {}, "tokenizer.json")
    write_model(directory / "broken", {})
    (directory / "broken" / "config.json").write_text("{", encoding="utf-8")
    write_model(directory / "short", {"max_position_embeddings": 20})
    write_model(directory / "endless", {"eos_token_id": None}, "generation_config.json")
    before = sorted(directory.rglob("*"))
    # Short, since the paths of sockets may have 107 bytes only.
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as temporary:
        for variable in ("RAY_ADDRESS", "RAY_TMPDIR"):
            patch.delenv(variable, raising=False)
        patch.setenv("TMPDIR", temporary)
        found = run(directory, [["train", *arguments] for arguments, _ in REFUSALS] + [["config", "nonesuch"]])
    assert sorted(directory.rglob("*")) == before, "a refused command left something"
    return found


@pytest.mark.parametrize("index", range(len(REFUSALS)), ids=[" ".join(arguments) for arguments, _ in REFUSALS])
def test_bad_input_is_one_line(answers: list[Answer], index: int) -> None:
    code, heavy, errors = answers[index]
    assert (code, errors.count("\n")) == (2, 1)
    assert errors.startswith("paceline: error: ")
    assert REFUSALS[index][1] in errors
    assert heavy == []


def test_a_search_without_a_match_is_one_line(answers: list[Answer]) -> None:
    assert answers[-1] == (2, [], "paceline: error: no key matches 'nonesuch'\n")
