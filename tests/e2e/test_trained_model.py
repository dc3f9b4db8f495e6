"""The model that a run leaves, loaded and asked by transformers alone."""

from __future__ import annotations

from collections import defaultdict
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.task.arithmetic import problems
from tests.e2e.train_process import TrainProcess

SHIPPED = Path(str(resources.files("paceline"))) / "assets" / "tiny_model"


def greedy_answers(directory: Path, prompts: list[str]) -> list[str]:
    """What the model in `directory` answers; prompts of one length share a batch."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    by_length: dict[int, list[str]] = defaultdict(list)
    for prompt in prompts:
        by_length[len(tokenizer(prompt)["input_ids"])].append(prompt)
    answers: dict[str, str] = {}
    for same_length in by_length.values():
        ids = torch.tensor([tokenizer(prompt)["input_ids"] for prompt in same_length])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
        texts = tokenizer.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True)
        answers.update(zip(same_length, texts, strict=True))
    return [answers[prompt] for prompt in prompts]


def test_transformers_loads_it_and_finds_the_accuracy_that_the_run_reports(finished: TrainProcess) -> None:
    asked = problems("validation")[:200]
    prompts = [problem.prompt for problem in asked]
    before, after = (greedy_answers(path, prompts) for path in (SHIPPED, finished.run_dir / "model"))
    assert before != after
    accuracies = [
        sum(answer == problem.answer for answer, problem in zip(answers, asked, strict=True)) / len(asked)
        for answers in (before, after)
    ]
    summary = finished.summary()
    reported = [summary["val_accuracy_first"], summary["val_accuracy_last"]]
    # Sums are made in another order here: an answer whose two best tokens are nearly equal may differ.
    assert accuracies == pytest.approx(reported, abs=0.011)
