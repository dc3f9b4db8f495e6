"""Records that flow from the prompt data set to the trainer.

A *sample* is a prompt with its `rollout.n` responses; it is the unit of admission, of the ledger (L1) and of the batch.
Per-token lists of a response always have equal length. Versions are packed int64 (`core.version`).
All records are msgspec structs: they cross processes as msgpack, never as pickles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How tokens are drawn. `temperature` 0 is greedy; `top_p` 1 and `top_k` -1 are off.

    Example: `SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8, stop_token_ids=(2,), stop=())`.
    """

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...] = ()


class Prompt(msgspec.Struct, frozen=True, array_like=True):
    """One row of a data set, tokenised once. `prompt_id` is unique within an epoch and names the row.

    `ground_truth` and `extra_info` are what the row has for its reward: anything that msgpack can carry.
    """

    prompt_id: str
    text: str
    token_ids: tuple[int, ...]
    ground_truth: Any
    data_source: str
    extra_info: dict[str, Any] = msgspec.field(default_factory=dict)


class GenerationRequest(msgspec.Struct, array_like=True):
    """One response to be generated, or continued when `response_ids` is not empty.

    `pinned_version` None means the live weights; a packed version means weights pinned for a validation.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    response_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[float] = msgspec.field(default_factory=list)
    versions: list[int] = msgspec.field(default_factory=list)
    pinned_version: int | None = None


class Completion(msgspec.Struct, array_like=True):
    """What an engine made of a request: all tokens of the response, with natural-log probabilities of the sampled
    distribution and the packed version that made each. A stop token that was sampled is the last id.

    "abort": it was taken out before it was finished; "error": the engine cannot run it, `error` says why."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    error: str = ""


class StepTokens(NamedTuple):
    """What one decode step made: a token per request, all under `version` (packed); the lists are equally long."""

    request_ids: list[str]
    token_ids: list[int]
    logprobs: list[float]
    version: int


class Score(msgspec.Struct, frozen=True, array_like=True):
    """A reward, and what else its function measured of the response. Example: `Score(1.0, {"format": 1.0})`."""

    value: float
    metrics: dict[str, float] = msgspec.field(default_factory=dict)


class Response(msgspec.Struct, array_like=True):
    """A scored completion. `text` is decoded for rewards and people only; it is never re-encoded (V8).
    `reward_metrics` are those of its `Score`.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    text: str
    reward: float
    reward_metrics: dict[str, float] = msgspec.field(default_factory=dict)


class Sample(msgspec.Struct, array_like=True):
    """A prompt with its scored responses. `life` is the life of the run that admitted it."""

    sample_id: str
    life: int
    prompt: Prompt
    responses: list[Response]


class TrainSequence(msgspec.Struct, array_like=True):
    """One response as the train backend needs it; `loss_mask` is 1 where a token counts in the loss. `lags` has the
    version lag of each token, for the metrics alone; empty where it is not known.
    """

    prompt_ids: tuple[int, ...]
    response_ids: list[int]
    rollout_logprobs: list[float]
    loss_mask: list[int]
    advantage: float
    lags: list[int] = msgspec.field(default_factory=list)


class TrainBatch(msgspec.Struct):
    """All sequences of one update (of `ppo_mini_batch_size * require_batches` samples).

    Updates of the same `window` share their proximal policy: the weights before the first of them. None: every update
    has its own.
    """

    sequences: list[TrainSequence]
    temperature: float
    window: int | None = None


def encode_sample(sample: Sample) -> bytes:
    """Msgpack bytes of a sample, as they cross the message queue."""
    return msgspec.msgpack.encode(sample)


def decode_sample(data: bytes) -> Sample:
    """Inverse of `encode_sample`; refuses anything of another shape."""
    return msgspec.msgpack.decode(data, type=Sample)


def response_lengths(samples: Iterable[Sample]) -> dict[int, int]:
    """Response length in tokens -> number of responses: dropping the oldest unlearns long answers, so drops are shown
    by length.
    """
    return dict(Counter(len(response.token_ids) for sample in samples for response in sample.responses))


def sample_id_of(life: int, number: int) -> str:
    """The id of a sample: the life that admitted it and its number among all that the run has admitted, over all lives.

    Example: `sample_id_of(2, 57) == "2-57"`.
    """
    return f"{life}-{number}"


def sample_number(sample_id: str) -> int:
    """Number of a sample over all lives of its run. Prompts are drawn in this order, one per number."""
    return int(sample_id.rpartition("-")[2])
