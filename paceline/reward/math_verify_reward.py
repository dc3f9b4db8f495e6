"""Reward `math_verify`: whether the answer in a response equals the ground truth as mathematics.

The answer is what math-verify extracts (the last boxed expression, else the last one it finds). Runs in a process of
its own, since a pathological expression can take the algebra system very long.
"""

from __future__ import annotations

from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1.0 if they are equal, else 0.0.

    Raises:
        ValueError: the ground truth is no mathematics.
    """
    text = str(ground_truth)
    truth = text if "\\boxed" in text or "$" in text else f"\\boxed{{{text}}}"
    gold = parse(truth, [LatexExtractionConfig(), ExprExtractionConfig()])
    if not gold:
        raise ValueError(f"math-verify finds no expression in the ground truth {text!r}")
    answer = parse(solution_str, [LatexExtractionConfig(), ExprExtractionConfig()])
    return float(verify(gold, answer))
