"""DAPO's soft overlong punishment: a response that comes near to the length limit loses reward, linearly."""

from __future__ import annotations


def overlong_penalty(tokens: int, *, max_response_length: int, buffer_length: int, penalty_factor: float) -> float:
    """What is added to the reward of a response of so many tokens; 0 or negative.

    DAPO, arXiv 2503.14476, equation 13: within the last `buffer_length` tokens before the limit the penalty grows
    linearly from 0 to `penalty_factor`.

    Example: limit 20, buffer 4, factor 1: 16 tokens cost 0, 18 tokens -0.5, 20 tokens -1.
    """
    over = tokens - (max_response_length - buffer_length)
    return -penalty_factor * over / buffer_length if over > 0 else 0.0
