"""What a run trains on, from its configuration: prompts and their reward, checked before anything starts.

The one place that tells the embedded task, files and reasoning-gym apart.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from paceline.core.config import Config, build_config
from paceline.core.errors import ConfigError, PromptError
from paceline.core.ports import PromptSource, RewardFn
from paceline.core.sample import Prompt
from paceline.dataset.gym_rows import EXTRA_INFO
from paceline.dataset.opening import is_generated, open_training, open_validation
from paceline.dataset.prompt_rows import PromptRows, check, cut, refuse_longer
from paceline.dataset.rows import Rows
from paceline.reward.arithmetic_reward import ArithmeticReward
from paceline.reward.function_spec import FunctionSpec
from paceline.reward.process_reward import ProcessReward, open_reward
from paceline.runtime.registry import model_path
from paceline.task.arithmetic import Problem, problems
from paceline.tokenizer.chat_template import read_chat_template
from paceline.tokenizer.fast_tokenizer import FastTokenizer
from paceline.tokenizer.prompt_renderer import PromptRenderer

BLOCKED_SECONDS = 5.0
BUILT_IN = {
    "math_verify": "paceline.reward.math_verify_reward",
    "reasoning_gym": "paceline.reward.reasoning_gym_reward",
}


class Checked(NamedTuple):
    """How much of each data set is checked before anything starts: rows for their schema, and of these so many as
    prompts. Problems that are made as they are drawn are alike, and making them takes its time.
    """

    rows: int = 50_000
    prompts: int = 2_000
    problems: int = 20


DEFAULT_CHECKED = Checked()


def settle_paths(config: Config) -> Config:
    """The configuration with absolute paths, so that they mean the same in every process and when the run goes on."""
    tree = config.model_dump(mode="json")
    for key in ("train_files", "val_files"):
        tree["data"][key] = [e if is_generated(e) else str(Path(e).absolute()) for e in tree["data"][key]]
    custom = tree["reward"]["custom_reward_function"]
    if custom["path"] is not None:
        custom["path"] = str(Path(custom["path"]).absolute())
    return build_config(tree)


def check_task(config: Config, checked: Checked = DEFAULT_CHECKED) -> None:
    """Refuse, before anything starts, prompts and rewards that cannot be used.

    Raises:
        ConfigError: which file, row, prompt or function, and what to do.
    """
    directory = model_path(config)
    renderer = build_renderer(config, FastTokenizer(str(directory)), directory)
    if config.data.train_files or config.data.val_files:
        _check_files(config, renderer, checked)
    if not config.data.train_files:
        if config.reward.name == "reasoning_gym":
            raise ConfigError("reward.name=reasoning_gym: the embedded task has a scorer of its own; leave the key out")
        _embedded(config, renderer)
    scorer_of(config)
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(_try_reward(config, Path(scratch) / "reward.log"))


async def _try_reward(config: Config, log: Path) -> None:
    await close_reward(await build_reward(config, log))


def build_renderer(config: Config, tokenizer: FastTokenizer, directory: Path) -> PromptRenderer:
    """Prompts as this model is asked them.

    Raises:
        ConfigError: the model's chat template cannot be read.
    """
    return PromptRenderer(tokenizer, read_chat_template(directory, config.data.apply_chat_template_kwargs))


def build_prompts(config: Config, renderer: PromptRenderer, spill_dir: Path | None = None) -> PromptSource:
    """Training and validation prompts. `spill_dir` is where large Parquet files are unpacked, without a name.

    Raises:
        ConfigError: a data set cannot be used, or a validation prompt.
    """
    from paceline.rollout.prompt_dataset import PromptDataset

    data = config.data
    if not data.train_files and not data.val_files:
        train, validation = _embedded(config, renderer)
        return PromptDataset(train=train, validation=validation, seed=data.seed)
    chat = renderer.takes_chats
    held_out = _validation(config, open_validation(data, chat=chat, spill_dir=spill_dir), renderer)
    if not data.train_files:
        return PromptDataset(train=_embedded(config, renderer)[0], validation=held_out, seed=data.seed)
    rows = _prompt_rows(config, open_training(data, chat=chat, spill_dir=spill_dir), renderer)
    return PromptDataset(train=rows, validation=held_out, seed=data.seed)


def restore_prompts(prompts: PromptSource, encoded: bytes) -> None:
    """Put the prompts where they stood in an earlier life.

    Raises:
        ConfigError: they were another data set, or cannot be put there.
    """
    from paceline.rollout.prompt_dataset import DatasetCursor, PromptDataset

    if not isinstance(prompts, PromptDataset):
        raise ConfigError(f"a run cannot go on: {type(prompts).__name__} does not know how to return to a place")
    prompts.restore(msgspec.msgpack.decode(encoded, type=DatasetCursor))


def scorer_of(config: Config) -> str | None:
    """The built-in scorer that counts; None: the custom reward function does.

    Raises:
        ConfigError: neither is named, and the task has none of its own.
    """
    if config.reward.custom_reward_function.path is not None:
        return None
    if config.reward.name is not None:
        return config.reward.name
    data = config.data
    kinds = {"reasoning_gym" if is_generated(entry) else "file" for entry in (*data.train_files, *data.val_files)}
    kinds |= set() if data.train_files else {"arithmetic"}
    (kind, *others) = sorted(kinds)
    if others or kind == "file":
        raise ConfigError(
            "reward: no scorer is named for the rows of data.train_files and data.val_files: set "
            "reward.custom_reward_function.path to a Python file, or reward.name to math_verify"
        )
    return kind


async def build_reward(config: Config, log: Path) -> RewardFn:
    """The scorer, with a process that is ready where it runs in processes; what it prints is added to `log`.

    Raises:
        ConfigError: it cannot be loaded.
    """
    scorer = scorer_of(config)
    if scorer == "arithmetic":
        return ArithmeticReward()
    reward = config.reward
    return await open_reward(_function_spec(config, scorer), log, reward.num_workers, reward.timeout_seconds)


async def close_reward(reward: RewardFn) -> None:
    """End the processes that it runs in."""
    if isinstance(reward, ProcessReward):
        await reward.close()


def _function_spec(config: Config, scorer: str | None) -> FunctionSpec:
    reward = config.reward
    custom = reward.custom_reward_function
    return FunctionSpec(
        path=custom.path if scorer is None else None,
        module="" if scorer is None else BUILT_IN[scorer],
        name=custom.name if scorer is None else "compute_score",
        arguments=reward.reward_kwargs,
        attempts=reward.retry_attempts,
        wait_seconds=reward.retry_wait_seconds,
        blocked_seconds=min(BLOCKED_SECONDS, reward.timeout_seconds / 2),
    )


def _prompt_rows(config: Config, parts: Sequence[Rows], renderer: PromptRenderer) -> PromptRows:
    data = config.data
    return PromptRows(
        parts,
        renderer=renderer,
        prompt_key=data.prompt_key,
        longest=data.max_prompt_length,
        truncation=data.truncation,
    )


def _check_files(config: Config, renderer: PromptRenderer, checked: Checked) -> None:
    data = config.data
    files = [entry for entry in data.train_files if not is_generated(entry)]
    if files and not data.val_files and config.trainer.test_freq > 0:
        raise ConfigError("data.val_files: name the validation prompts, or set trainer.test_freq=0 to do without")
    for entries, opened in ((data.train_files, open_training), (data.val_files, open_validation)):
        for entry in entries:
            key = "train_files" if opened is open_training else "val_files"
            alone = data.model_copy(update={"train_files": (), "val_files": (), key: (entry,)})
            rows = opened(alone, chat=renderer.takes_chats, spill_dir=None, at_most=checked.rows)
            made = is_generated(entry)
            check(
                _prompt_rows(config, rows, renderer),
                longest=data.max_prompt_length,
                truncation=data.truncation,
                whole=checked.problems if made else checked.rows,
                rendered=checked.problems if made else checked.prompts,
                extra_info=EXTRA_INFO if config.reward.name == "reasoning_gym" else (),
            )


def _validation(config: Config, parts: Sequence[Rows], renderer: PromptRenderer) -> list[Prompt]:
    data = config.data
    rows = _prompt_rows(config, parts, renderer)
    prompts: list[Prompt] = []
    for place in range(len(rows)):
        try:
            prompt = rows[place]
        except PromptError as error:
            raise ConfigError(error.message) from error
        refuse_longer(prompt, longest=data.max_prompt_length, truncation=data.truncation)
        if len(prompt.token_ids) <= data.max_prompt_length:
            prompts.append(prompt)
    return prompts


def _embedded(config: Config, renderer: PromptRenderer) -> tuple[list[Prompt], list[Prompt]]:
    """Training and validation prompts of the arithmetic task."""
    size = config.data.val_size
    held_out = problems("validation")
    if size > len(held_out):
        raise ConfigError(f"data.val_size: the arithmetic task has {len(held_out)} validation problems")
    return (
        [_arithmetic_prompt(config, problem, renderer) for problem in problems("train")],
        [_arithmetic_prompt(config, problem, renderer) for problem in held_out[:size]],
    )


def _arithmetic_prompt(config: Config, problem: Problem, renderer: PromptRenderer) -> Prompt:
    data = config.data
    text, token_ids = renderer.render(problem.prompt)
    prompt = Prompt(
        prompt_id=problem.problem_id,
        text=text,
        token_ids=tuple(cut(token_ids, longest=data.max_prompt_length, truncation=data.truncation)),
        ground_truth=problem.answer,
        data_source="arithmetic",
    )
    refuse_longer(prompt, longest=data.max_prompt_length, truncation=data.truncation)
    return prompt
