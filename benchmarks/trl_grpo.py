"""TRL's GRPOTrainer on the shipped model and the arithmetic task, with the batch and the settings of `paceline train`.

    python -m benchmarks.trl_grpo [--seed 0] [--updates 80] [--json FILE]

64 prompts of 8 responses per update, temperature 1, AdamW with the same rate, betas, warm-up and clipping of gradients,
the same clip of the ratio, advantages by standard deviation, mean over tokens, no reference model. Generation is TRL's
own (`generate` of transformers) in the same process. Every 10 updates the 2,000 validation problems are answered
greedily, as in `paceline train`; the time that this takes is left out, where paceline validates beside training.
Prints one JSON object: accuracy over seconds of training, and responses/s.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from paceline.core.config import Config
from paceline.runtime.registry import model_path
from paceline.task.arithmetic import problems, score

CONFIG = Config()
PROMPTS, RESPONSES = CONFIG.actor.ppo_mini_batch_size, CONFIG.rollout.n
TEST_UPDATES = 10
VALIDATION = problems("validation")[: CONFIG.data.val_size]


class Curve(TrainerCallback):
    """Accuracy over seconds of training; the clock stands still while it is measured."""

    def __init__(self, tokenizer: Any) -> None:
        self.points: list[tuple[float, float]] = []
        self.seconds = 0.0
        self._tokenizer = tokenizer
        self._since = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._measure(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds += time.perf_counter() - self._since
        if state.global_step % TEST_UPDATES == 0:
            self._measure(kwargs["model"])
        self._since = time.perf_counter()

    def _measure(self, model: Any) -> None:
        texts = [problem.prompt for problem in VALIDATION]
        prompts = self._tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
        was_training = model.training
        model.eval()
        with torch.no_grad():
            ids = model.generate(
                **prompts, do_sample=False, max_new_tokens=CONFIG.data.max_response_length, use_cache=True
            )
        model.train(was_training)
        answers = self._tokenizer.batch_decode(ids[:, prompts.input_ids.shape[1] :], skip_special_tokens=True)
        right = sum(score(text, problem.answer) for text, problem in zip(answers, VALIDATION, strict=True))
        self.points.append((self.seconds, right / len(VALIDATION)))
        self._since = time.perf_counter()


def reward(prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Exact match, as in the task."""
    return [score(text, right) for text, right in zip(completions, answer, strict=True)]


def settings(directory: str, seed: int, updates: int) -> GRPOConfig:
    """Those of the default job."""
    actor = CONFIG.actor
    return GRPOConfig(
        output_dir=directory,
        seed=seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=updates,
        per_device_train_batch_size=PROMPTS * RESPONSES,
        num_generations=RESPONSES,
        num_iterations=1,
        max_completion_length=CONFIG.data.max_response_length,
        temperature=CONFIG.rollout.temperature,
        learning_rate=actor.optim.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=actor.optim.lr_warmup_steps,
        adam_beta1=actor.optim.betas[0],
        adam_beta2=actor.optim.betas[1],
        weight_decay=actor.optim.weight_decay,
        max_grad_norm=actor.grad_clip,
        epsilon=actor.clip_ratio_low,
        epsilon_high=actor.clip_ratio_high,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        disable_dropout=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )


def run(seed: int, updates: int) -> dict[str, Any]:
    """Train; the curve and the speed."""
    train = list(problems("train"))
    random.Random(seed).shuffle(train)
    rows = Dataset.from_list([{"prompt": problem.prompt, "answer": problem.answer} for problem in train])
    path = str(model_path(CONFIG))
    tokenizer = AutoTokenizer.from_pretrained(path)
    curve = Curve(tokenizer)
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=path,
            reward_funcs=reward,
            args=settings(directory, seed, updates),
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=[curve],
        )
        trainer.train()
    return {"curve": curve.points, "responses_per_second": updates * PROMPTS * RESPONSES / curve.seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=80)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    text = json.dumps(run(arguments.seed, arguments.updates))
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
