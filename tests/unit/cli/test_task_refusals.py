"""Every error of a user's data, rewards and validations is one line that says what to do, before anything starts."""

from __future__ import annotations

import json
import shutil

import pytest

from paceline.core.config import build_config
from paceline.runtime.registry import model_path
from tests.unit.cli.test_refusals import Answer, run
from tests.unit.dataset.files import sum_row, write_jsonl, write_parquet

SIGNATURE = "data_source, solution_str, ground_truth, extra_info"
GOOD = ["data.train_files=good.jsonl", "data.val_files=good.jsonl"]
SCORED = [*GOOD, "reward.name=arithmetic"]
MINE = "reward.custom_reward_function.path="
FUNCTIONS = {
    "good.py": f"def compute_score({SIGNATURE}): return 1",
    "syntax.py": "def compute_score(:",
    "library.py": "import no_such_library",
    "nameless.py": "def other(): return 1",
    "narrow.py": "def compute_score(solution_str): return 1",
    "exits.py": "import os; os._exit(5)",
    "five.py": "compute_score = 5",
}
REFUSALS = [
    # files
    (["data.train_files=nowhere.jsonl", "data.val_files=good.jsonl"], "nowhere.jsonl: there is no such file"),
    (["data.train_files=good.jsonl", "data.val_files=nowhere.jsonl"], "nowhere.jsonl: there is no such file"),
    (["data.train_files=empty.jsonl", "data.val_files=good.jsonl"], "empty.jsonl: has no rows"),
    (["data.train_files=rows.csv", "data.val_files=good.jsonl"], "rows.csv: is neither JSONL (.jsonl, .json) nor"),
    (["data.train_files=broken.parquet", "data.val_files=good.jsonl"], "broken.parquet: cannot be read"),
    (
        ["data.train_files=array.json", "data.val_files=good.jsonl"],
        "array.json:2: is no JSON object on a line of its own",
    ),
    (["data.train_files=.", "data.val_files=good.jsonl"], "there is no such file"),
    (["data.train_files=good.jsonl"], "data.val_files: name the validation prompts, or set trainer.test_freq=0"),
    # rows
    (["data.train_files=[good.jsonl,bad.jsonl]", GOOD[1]], "bad.jsonl:3: has no reward_model.ground_truth"),
    ([GOOD[0], "data.val_files=[good.jsonl,bad.jsonl]"], "bad.jsonl:3: has no reward_model.ground_truth"),
    (["data.train_files=bad.parquet", GOOD[1]], "bad.parquet:row 0: has no 'prompt' (data.prompt_key names the field"),
    ([*SCORED, "data.prompt_key=question"], "good.jsonl:1: has no 'question' (data.prompt_key names the field"),
    (
        ["data.train_files=chat.jsonl", GOOD[1]],
        "chat.jsonl:1: is a chat, but the model has no chat template: use plain",
    ),
    (["model.path=strict", "data.train_files=chat.jsonl", GOOD[1]], "chat.jsonl:1: the model's chat template does not"),
    (["model.path=torn", *SCORED], "the model's chat template cannot be read"),
    ([*SCORED, "data.max_prompt_length=3"], "data.max_prompt_length: "),
    (
        [*SCORED, "data.max_prompt_length=3", "data.truncation=filter"],
        "data.max_prompt_length: all of the 2 prompts that begin with",
    ),
    (["data.train_files=[1,2]"], "data.train_files.0: "),
    ([*SCORED, "data.truncation=middle"], "data.truncation: "),
    ([*SCORED, "data.val_max_samples=0"], "data.val_max_samples: has to be -1 (all rows) or at least 1"),
    # reasoning-gym
    (["data.train_files=reasoning_gym:chainsum"], "no such data set; did you mean chain_sum?"),
    (["data.train_files=reasoning_gym:chain_sum?max_terms=0"], "max_terms must be >= min_terms"),
    (["data.train_files=reasoning_gym:chain_sum?size=0"], "size must be positive"),
    (["data.train_files=reasoning_gym:chain_sum?seed=abc"], "reasoning_gym:chain_sum:0: cannot be made: TypeError"),
    ([*GOOD, "reward.name=reasoning_gym"], "good.jsonl:1: has no extra_info.dataset, which the reward needs"),
    (["reward.name=reasoning_gym"], "the embedded task has a scorer of its own; leave the key out"),
    (["data.train_files=reasoning_gym:chain_sum?max_terms"], "is not of the form parameter=value"),
    (["data.train_files=reasoning_gym:chain_sum?system_prompt=mine"], "system_prompt=mine: reasoning-gym has"),
    (["data.train_files=reasoning_gym:chain_sum"], "data.max_prompt_length: reasoning_gym:chain_sum:0 has "),
    # rewards
    (GOOD, "reward: no scorer is named for the rows of data.train_files and data.val_files: set reward.custom"),
    ([*GOOD, "reward.name=judge"], "reward.name: "),
    ([*SCORED, f"{MINE}good.py"], "reward.name=arithmetic and reward.custom_reward_function.path: set one of them"),
    ([*SCORED, "reward.reward_kwargs={a: 1}"], "reward.reward_kwargs are for reward.custom_reward_function.path"),
    ([*GOOD, f"{MINE}nowhere.py"], "nowhere.py: there is no such file"),
    ([*GOOD, f"{MINE}."], "it is no Python file"),
    ([*GOOD, f"{MINE}rows.csv"], "rows.csv: cannot be loaded: ImportError: it is no Python file"),
    ([*GOOD, f"{MINE}five.py"], "five.py: has no function compute_score"),
    ([*GOOD, f"{MINE}syntax.py"], "syntax.py: cannot be loaded: SyntaxError"),
    ([*GOOD, f"{MINE}library.py"], "library.py: cannot be loaded: ModuleNotFoundError"),
    ([*GOOD, f"{MINE}nameless.py"], "nameless.py: has no function compute_score"),
    ([*GOOD, f"{MINE}narrow.py"], "narrow.py: compute_score is called with data_source, solution_str, ground_truth"),
    ([*GOOD, f"{MINE}exits.py"], "exits.py: its process ended with 5 while it was loaded"),
    ([*GOOD, f"{MINE}good.py", "reward.reward_kwargs={a: 1}"], "got an unexpected keyword argument 'a'"),
    ([*GOOD, f"{MINE}good.py", "reward.reward_kwargs={data_source: 1}"], "got multiple values for keyword argument"),
    ([*SCORED, "reward.timeout_seconds=0"], "reward.timeout_seconds: "),
    # validation
    ([*SCORED, "rollout.val_kwargs.n=4"], "rollout.val_kwargs: n=4 greedy responses are all the same: set do_sample"),
    ([*SCORED, "rollout.val_kwargs.do_sample=true"], "rollout.val_kwargs: do_sample=true needs a temperature above 0"),
    ([*SCORED, "rollout.val_kwargs.top_p=2"], "rollout.val_kwargs.top_p: "),
]
CHECKS = [
    (["nowhere.py", "--data", "good.jsonl"], "nowhere.py: there is no such file"),
    (["nameless.py", "--data", "good.jsonl"], "nameless.py: has no function compute_score"),
    (["good.py", "--data", "good.jsonl", "--name", "other"], "good.py: has no function other"),
    (["good.py", "--data", "good.jsonl", "--kwargs", "{"], "--kwargs: is no JSON"),
    (["good.py", "--data", "good.jsonl", "--kwargs", "[]"], "--kwargs: has to be a JSON object"),
    (["good.py", "--data", "nowhere.jsonl"], "nowhere.jsonl: there is no such file"),
    (["good.py", "--data", "reasoning_gym:chainsum"], "no such data set; did you mean chain_sum?"),
    (["math_verify", "--data", "good.jsonl", "--kwargs", '{"a": 1}'], "reward.reward_kwargs are for reward.custom_rew"),
    (["good.py", "--data", "good.jsonl", "--timeout", "0"], "greater than or equal to 0.01"),
    (["good.py", "--data", "good.jsonl", "-n", "0"], "greater than or equal to 1"),
    (["good.py"], "data"),
]
COMMANDS = [(["train", *settings], line) for settings, line in REFUSALS]
COMMANDS += [(["check-reward", *arguments], line) for arguments, line in CHECKS]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    directory = tmp_path_factory.mktemp("refusals")
    write_jsonl(directory / "good.jsonl", [sum_row(0), sum_row(1)])
    write_jsonl(directory / "bad.jsonl", [sum_row(0), sum_row(1), sum_row(2, reward_model=None)])
    write_jsonl(directory / "chat.jsonl", [sum_row(0, prompt=[{"role": "user", "content": "1"}])])
    write_parquet(directory / "bad.parquet", [sum_row(0, prompt=None, text="1+1=")])
    (directory / "array.json").write_text(json.dumps([sum_row(0)], indent=1), encoding="utf-8")
    for name in ("empty.jsonl", "rows.csv", "broken.parquet"):
        (directory / name).write_text("" if name == "empty.jsonl" else "a,b\n", encoding="utf-8")
    for name, text in FUNCTIONS.items():
        (directory / name).write_text(text, encoding="utf-8")
    for name, template in (("strict", "{{ raise_exception('no') }}"), ("torn", "{% if %}")):
        shutil.copytree(model_path(build_config({})), directory / name)
        (directory / name / "chat_template.jinja").write_text(template, encoding="utf-8")
    before = sorted(path for path in directory.rglob("*"))
    found = run(directory, [arguments for arguments, _ in COMMANDS])
    after = sorted(path for path in directory.rglob("*") if "__pycache__" not in path.parts)
    assert after == before, "a refused command left something"
    return found


@pytest.mark.parametrize("index", range(len(COMMANDS)), ids=[" ".join(arguments) for arguments, _ in COMMANDS])
def test_it_is_one_line(answers: list[Answer], index: int) -> None:
    code, heavy, errors = answers[index]
    assert code == 2
    assert errors.startswith("paceline: error: ")
    assert errors.count("\n") == 1
    assert COMMANDS[index][1] in errors
    assert heavy == []
