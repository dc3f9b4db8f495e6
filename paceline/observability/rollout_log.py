"""The record of every response: `rollouts/<n>.jsonl`, n of the version at which its sample ended.

One line is one sample:

    {"sample_id", "life", "version": "life.n" at which it ended, "fate": "trained" | "dropped" | "failed",
     "prompt_id", "prompt", "ground_truth", "data_source",
     "responses": [{"text", "reward", "finish_reason", "token_ids", "logprobs", "versions", "reward_metrics"}]}

`versions` is run-length coded: `[["1.7", 5], ["1.8", 3]]` says that version 1.7 made the first 5 tokens and 1.8 the
next 3.
Lines wait in memory until `flush`, or until there are `MAX_PENDING_BYTES` of them; an error of the disk is counted and
logged once, never raised into the loop that records.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.core.sample import FinishReason, Response, Sample
from paceline.core.version import Version
from paceline.observability.append_file import AppendFile

logger = logging.getLogger(__name__)

MAX_PENDING_BYTES = 1 << 20

Fate = Literal["trained", "dropped", "failed"]


class ResponseRecord(msgspec.Struct):
    """One response as it stands in the file; the three lists describe the same tokens."""

    text: str
    reward: float
    finish_reason: FinishReason
    token_ids: list[int]
    logprobs: list[float]
    versions: list[tuple[str, int]]
    reward_metrics: dict[str, float]


class RolloutRecord(msgspec.Struct):
    """One line of a rollout file."""

    sample_id: str
    life: int
    version: str
    fate: Fate
    prompt_id: str
    prompt: str
    ground_truth: Any
    data_source: str
    responses: list[ResponseRecord]


class JsonlRolloutLog:
    """A `RolloutLog` in `directory`, which is made if it is missing. Used by one process, from one thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._directory.mkdir(parents=True, exist_ok=True)
        self._encoder = msgspec.json.Encoder()
        self._pending: defaultdict[int, list[bytes]] = defaultdict(list)
        self._pending_bytes = 0
        self.errors = 0

    def record(self, sample: Sample, version: int, fate: Fate) -> None:
        """Note one sample that ended at the packed `version`."""
        line = self._encoder.encode(_rollout_record(sample, version, fate))
        self._pending[Version.unpack(version).n].append(line)
        self._pending_bytes += len(line)
        if self._pending_bytes >= MAX_PENDING_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits; call it once per update."""
        for n, lines in self._pending.items():
            self._append(self._directory / f"{n}.jsonl", b"\n".join(lines) + b"\n")
        self._pending.clear()
        self._pending_bytes = 0

    def close(self) -> None:
        """Write what waits; the log may be used again."""
        self.flush()

    def _append(self, path: Path, lines: bytes) -> None:
        try:
            file = AppendFile(path)
        except OSError as error:
            self.errors += 1
            if self.errors == 1:
                logger.warning("cannot write rollouts to %s: %s (said once)", path, error)
            return
        self.errors += not file.append(lines)
        file.close()


def encode_versions(versions: Sequence[int]) -> list[tuple[str, int]]:
    """Packed versions, one per token, as runs of ("life.n", count)."""
    return [(str(Version.unpack(version)), len(list(run))) for version, run in groupby(versions)]


def _rollout_record(sample: Sample, version: int, fate: Fate) -> RolloutRecord:
    return RolloutRecord(
        sample_id=sample.sample_id,
        life=sample.life,
        version=str(Version.unpack(version)),
        fate=fate,
        prompt_id=sample.prompt.prompt_id,
        prompt=sample.prompt.text,
        ground_truth=sample.prompt.ground_truth,
        data_source=sample.prompt.data_source,
        responses=[_response_record(response) for response in sample.responses],
    )


def _response_record(response: Response) -> ResponseRecord:
    return ResponseRecord(
        text=response.text,
        reward=response.reward,
        finish_reason=response.finish_reason,
        token_ids=response.token_ids,
        logprobs=response.logprobs,
        versions=encode_versions(response.versions),
        reward_metrics=response.reward_metrics,
    )
