"""Records of a checkpoint, and of what a run was doing when it was taken.

A checkpoint is a consistent cut: the trainer stands between two updates; every sample that the run has admitted has
either ended before it or is in it, once, as an open group or as a ready sample. Files and their names are the store's
affair (`store.checkpoint_directory`).
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.core.commands import ValidationResult
from paceline.core.config import Config
from paceline.core.sample import Completion, Prompt, Sample
from paceline.core.version import Lineage, Version

FORMAT = 1
ROLLOUTER_FILE = "rollouter.msgpack"
META_FILE = "meta.json"


class Partial(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that an unfinished response has, with the log-prob and the packed version of each; lists equally long."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]

    def __len__(self) -> int:
        return len(self.token_ids)


class JournalledSequence(msgspec.Struct, frozen=True):
    """All tokens of one request that the token journal of `life` has, those that it came with included.

    `prompt_check` is the checksum of its prompt (`prompt_checksum`).
    """

    life: int
    request_id: str
    prompt_check: int
    tokens: Partial


class OpenGroup(msgspec.Struct, array_like=True):
    """A sample in flight: its finished responses (None: not yet), what the others were issued with, how many replicas
    it has lost, and the indices of responses that cannot be made.
    """

    sample_id: str
    prompt: Prompt
    completions: list[Completion | None]
    carried: list[Partial | None]
    losses: int
    given_up: list[int] = msgspec.field(default_factory=list)


class RollouterSnapshot(msgspec.Struct):
    """All that is on its way to the trainer, and the counters over all lives.

    `admitted` samples were drawn so far, which is where the prompts stand too (`prompts`, encoded by their source);
    `failed` and `dropped` of them are made again under other numbers. `admitted_under` maps sample ids to the packed
    version published when they were admitted (kept for `max_version_lag_policy=wait` only). `window_taken` samples of
    the open admission window were trained already.
    """

    life: int
    admitted: int
    failed: int
    dropped: int
    prompts: bytes
    groups: list[OpenGroup]
    ready: list[Sample]
    admitted_under: dict[str, int]
    window_taken: int = 0

    @property
    def open_ids(self) -> list[str]:
        """Every sample in it."""
        return [group.sample_id for group in self.groups] + [sample.sample_id for sample in self.ready]

    @property
    def taken(self) -> int:
        """Samples that the trainer has had for good: trained, or dropped by it."""
        return self.admitted - self.failed - len(self.groups) - len(self.ready)


class CheckpointMeta(msgspec.Struct, frozen=True):
    """What a checkpoint is of. `version` (packed) was captured last; `updates_since_sync` updates were made since.

    A life that goes on from here pushes these weights under the same n, so that an interruption adds to no token's lag:
    the uninterrupted trainer would stand at n too. `sampling` has the settings that must be the same when the run goes
    on; `lineage` is that of `life`. `validation` is the newest result that the trainer of this life has had.
    """

    format: int
    run_id: str
    life: int
    step: int
    version: int
    updates_since_sync: int
    lineage: Lineage
    admitted: int
    failed: int
    dropped: int
    open_ids: list[str]
    sampling: dict[str, Any]
    validation: ValidationResult | None = None

    def lineage_of(self, life: int, siblings: Sequence[int]) -> Lineage:
        """Lineage of a life that goes on from here; `siblings` did so before it."""
        n = Version.unpack(self.version).n
        return self.lineage.child(life, left_at=n, begin=n, siblings=siblings)


def sampling_settings(config: Config) -> dict[str, Any]:
    """The settings that decide what a sample is and how many make an update; a run cannot go on under others."""
    return {
        "model.path": config.model.path,
        "data.train_files": list(config.data.train_files),
        "data.prompt_key": config.data.prompt_key,
        "data.truncation": config.data.truncation,
        "data.apply_chat_template_kwargs": config.data.apply_chat_template_kwargs,
        "data.seed": config.data.seed,
        "data.max_prompt_length": config.data.max_prompt_length,
        "data.max_response_length": config.data.max_response_length,
        "actor.ppo_mini_batch_size": config.actor.ppo_mini_batch_size,
        "async_training.require_batches": config.async_training.require_batches,
        "rollout.n": config.rollout.n,
        "rollout.temperature": config.rollout.temperature,
        "rollout.top_p": config.rollout.top_p,
        "rollout.top_k": config.rollout.top_k,
    }


def encode_rollouter(snapshot: RollouterSnapshot) -> bytes:
    """Msgpack bytes of `rollouter.msgpack`."""
    return msgspec.msgpack.encode(snapshot)


def decode_rollouter(data: bytes) -> RollouterSnapshot:
    """Inverse of `encode_rollouter`; raises msgspec.DecodeError for anything of another shape."""
    return msgspec.msgpack.decode(data, type=RollouterSnapshot)


def prompt_checksum(prompt_ids: Sequence[int]) -> int:
    """CRC-32 of a prompt's token ids; tells whether two prompts are the same one."""
    return zlib.crc32(array("q", prompt_ids).tobytes())
