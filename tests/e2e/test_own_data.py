"""Runs on data and rewards as a user brings them: files in verl's schema, a function, scorers and data sets by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from paceline.task.arithmetic import Problem, problems
from tests.e2e.head_node import head_node
from tests.e2e.train_process import TrainProcess, train
from tests.unit.dataset.files import write_jsonl, write_parquet

SHIPPED = Path(str(resources.files("paceline"))) / "assets" / "tiny_model"
# Four updates of eight prompts, each with a validation.
SMALL = [
    *("rollout.num_replicas=1", "rollout.n=4", "rollout.total_rollout_steps=32", "actor.ppo_mini_batch_size=8"),
    *("async_training.trigger_parameter_sync_step=1", "trainer.test_freq=1", "trainer.save_freq=0"),
]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
JUDGE = """
import asyncio, os
async def compute_score(data_source, solution_str, ground_truth, extra_info, bonus):
    await asyncio.sleep(0.001)
    print("judged", extra_info["index"])
    right = solution_str == ground_truth
    return {"score": right + bonus, "acc": right, "length": len(solution_str), "rollouter": os.getppid()}
"""


def row(index: int, problem: Problem, prompt: object) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "data_source": "sums" if "+" in problem.prompt else "differences",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"index": index},
    }


def as_chats(chosen: Sequence[Problem]) -> list[dict[str, Any]]:
    """The template adds the equals sign, which the model has to be asked with."""
    return [
        row(index, problem, [{"role": "user", "content": problem.prompt.removesuffix("=")}])
        for index, problem in enumerate(chosen)
    ]


def copy_model(directory: Path, template: str | None) -> None:
    """The shipped model as another one: with a chat template, or without one and without a padding token."""
    shutil.copytree(SHIPPED, directory)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
        return
    for file in directory.glob("*config.json"):
        settings = {k: v for k, v in json.loads(file.read_text(encoding="utf-8")).items() if not k.startswith("pad_")}
        file.write_text(json.dumps(settings), encoding="utf-8")


def parent(pid: int) -> int:
    """Of a process: the raylet of the node that it runs on."""
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


def finish(run: TrainProcess) -> None:
    """The run comes to its end without a word on stderr."""
    ended = run.end(300)
    assert ended.code == 0, ended
    assert ended.err == ""
    assert run.summary()["steps"] == 4


def trained(run: TrainProcess) -> int:
    """Samples that updates were made of."""
    return sum(len(event["ids"]) for event in run.events("sample.trained"))


def last_validation(run: TrainProcess) -> Mapping[str, float]:
    metrics: Mapping[str, float] = run.events("validation.finished")[-1]["metrics"]
    return metrics


def test_parquet_chats_and_an_async_function(tmp_path: Path) -> None:
    copy_model(tmp_path / "model", TEMPLATE)
    (tmp_path / "judge.py").write_text(JUDGE, encoding="utf-8")
    write_parquet(tmp_path / "train.parquet", as_chats(problems("train")))
    write_parquet(tmp_path / "val.parquet", as_chats(problems("validation")[:40]))
    settings = [
        *("model.path=model", "data.train_files=train.parquet", "data.val_files=[val.parquet]"),
        *("reward.custom_reward_function.path=judge.py", "reward.reward_kwargs={bonus: 0.5}"),
        *("rollout.val_kwargs.n=2", "rollout.val_kwargs.do_sample=true", "rollout.val_kwargs.temperature=1.0"),
    ]
    with train(tmp_path, [*SMALL, *settings]) as run:
        finish(run)
        assert trained(run) == 32
        steps = run.events("train.step")
        assert all(0.5 <= step["reward_mean"] <= 1.5 for step in steps)
        assert all(step["metrics"]["reward/length/mean"] > 0 for step in steps)
        found = last_validation(run)
        for source in ("sums", "differences"):
            mean, best = (found[f"val-core/{source}/acc/{name}"] for name in ("mean@2", "best@2/mean"))
            assert 0 < mean <= best <= 1
            assert found[f"val-aux/{source}/length/mean@2"] > 0
        log = (run.run_dir / "reward.log").read_text(encoding="utf-8")
        assert log.count("judged") >= 32 * 4
        assert "judged" not in "".join(run.output())
        run.assert_nothing_is_left()


def test_jsonl_texts_for_a_base_model_and_math_verify(tmp_path: Path) -> None:
    copy_model(tmp_path / "model", None)
    texts = [row(index, problem, problem.prompt) for index, problem in enumerate(problems("train")[:3])]
    write_jsonl(tmp_path / "train.jsonl", [*texts, row(3, problems("train")[3], "1" * 99)])
    held_out = [row(index, problem, problem.prompt) for index, problem in enumerate(problems("validation")[:40])]
    write_jsonl(tmp_path / "one.jsonl", held_out[:20])
    write_jsonl(tmp_path / "two.jsonl", held_out[20:])
    settings = [
        *("model.path=model", "data.train_files=train.jsonl", "data.val_files=[one.jsonl,two.jsonl]"),
        *("reward.name=math_verify", "data.truncation=filter"),
    ]
    with train(tmp_path, [*SMALL, *settings]) as run:
        finish(run)
        # Three usable rows make 32 samples: more than ten epochs, in each of which the long one is left out.
        assert trained(run) == 32
        assert len(run.events("prompt.refused")) >= 10
        started = run.events("validation.started")
        assert {event["problems"] for event in started} == {40}
        found = last_validation(run)
        assert set(found) == {"val-core/sums/acc/mean@1", "val-core/differences/acc/mean@1"}
        assert all(0 < value <= 1 for value in found.values())


def test_a_reasoning_gym_data_set_by_name(tmp_path: Path) -> None:
    settings = [
        "data.train_files=reasoning_gym:chain_sum?max_terms=2&max_digits=1",
        *("data.max_prompt_length=120", "data.val_size=10"),
    ]
    with train(tmp_path, [*SMALL, *settings]) as run:
        finish(run)
        assert trained(run) == 32
        assert set(last_validation(run)) == {"val-core/reasoning_gym/chain_sum/acc/mean@1"}
        texts = "".join(file.read_text(encoding="utf-8") for file in (run.run_dir / "rollouts").glob("*.jsonl"))
        assert texts.count("State the final answer to the following arithmetic problem") >= 32


@pytest.mark.slow
def test_parquet_and_an_async_function_on_a_cluster_of_two_nodes(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(JUDGE, encoding="utf-8")
    for name, chosen in (("train", problems("train")), ("val", problems("validation")[:20])):
        texts = [row(index, problem, problem.prompt) for index, problem in enumerate(chosen)]
        write_parquet(tmp_path / f"{name}.parquet", texts)
    settings = [
        *("data.train_files=train.parquet", "data.val_files=val.parquet", "checkpoint_engine.backend=ray_object"),
        *("reward.custom_reward_function.path=judge.py", "reward.reward_kwargs={bonus: 0}"),
    ]
    with head_node(nodes=2) as address, train(tmp_path, [*SMALL, *settings, f"ray.address={address}"]) as run:
        nodes = {role: parent(run.until_started(role)) for role in ("trainer", "rollouter", "replica-0")}
        finish(run)
        assert nodes["trainer"] == nodes["rollouter"] != nodes["replica-0"]
        assert trained(run) == 32
        summary = run.summary()
        assert summary["syncs"]["verified_count"] == summary["syncs"]["count"] == 5
        assert all(step["metrics"]["reward/length/mean"] > 0 for step in run.events("train.step"))
        assert {"val-core/sums/acc/mean@1", "val-core/differences/acc/mean@1"} <= set(last_validation(run))
        assert (run.run_dir / "reward.log").read_text(encoding="utf-8").count("judged") >= 32 * 4
        run.assert_nothing_is_left()
