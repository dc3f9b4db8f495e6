"""Seams of paceline: what the loops (sync, rollout, train, queue) are handed, and never import.

Each port is short and has at least two implementations; `tests/contract` runs one suite against every one of them.
Methods that may block are coroutines; plain methods are computations that the caller runs through the `Work` port.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, runtime_checkable

import msgspec

from paceline.core.commands import (
    CaptureCommand,
    CaptureReport,
    ExchangeReply,
    ExchangeRequest,
    PublishCommand,
    PublishReport,
    QueueStatistics,
    ReplicaReport,
    StageCommand,
    StageReport,
    SwapCommand,
    SwapReport,
    SyncReport,
)
from paceline.core.manifest import WeightManifest
from paceline.core.sample import Completion, GenerationRequest, Prompt, Sample, Score, StepTokens, TrainBatch

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

VALIDATOR = "validator"  # role of the trainer's side of validations


class Clock(Protocol):
    """Time of the loops. `now` is monotonic seconds for durations, `wall` unix seconds for deadlines and logs."""

    def now(self) -> float: ...

    def wall(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class Work(Protocol):
    """Where CPU work of a loop runs: a thread of the process, or inline under the virtual clock."""

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job` and return its result; its exception is raised here."""
        ...


# ---- trainer side ---------------------------------------------------------------------------------------------------


class TrainBackend(Protocol):
    """Forward, backward, step; knows nothing of replicas, queues or versions."""

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """One optimiser step over the batch; returns metrics (`actor/...`)."""
        ...

    def named_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """All parameters and persistent buffers, every name of tied weights included, in a stable order."""
        ...

    def save_pretrained(self, directory: str) -> None:
        """Write the model as a Hugging Face directory."""
        ...

    def save_state(self, directory: str) -> bool:
        """Write weights, optimiser and random state; returns whether all numbers are finite."""

    def load_state(self, directory: str) -> None:
        """Go on, bit for bit, from what `save_state` wrote. Raises CheckpointError: it is of another model."""


# ---- replica side ---------------------------------------------------------------------------------------------------


class InferenceEngine(Protocol):
    """One inference library with one set of weights. Not thread-safe: steps and swaps never overlap."""

    @property
    def apply(self) -> Literal["mapped", "copied"]:
        """What `bind` does: point at the tensors, or copy them into memory of the engine's own. Never changes."""
        ...

    def expected_tensors(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape) of every tensor the engine serves from, aliases included. Never changes."""
        ...

    def expected_ties(self) -> Sequence[tuple[str, str]]:
        """Pairs of names that are one tensor in the engine. Never changes."""
        ...

    def bind(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Serve from these tensors from the next step on; in-flight sequences follow the engine's KV policy.

        Raises CoverageError and changes nothing when names, dtypes, shapes or layouts differ. A copied engine that
        fails half-way is right again once the old version is bound.
        """
        ...

    def unbind(self) -> None:
        """Let go of the bound tensors, so that their lease can end; requests still queued are forgotten."""
        ...

    def served_tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors the engine reads now, by every name: proof of what is served."""
        ...

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; a request that carries response tokens is continued."""
        ...

    def abort(self, request_ids: Sequence[str]) -> list[Completion]:
        """Take these requests out and return what they have, with finish reason "abort"."""
        ...

    def step(self) -> list[Completion]:
        """One decode step (prefill of admitted requests included); returns sequences that finished in it."""
        ...

    @property
    def last_step(self) -> StepTokens | None:
        """The tokens that the last `step` made, one per running sequence; None when it made none."""
        ...

    @property
    def version(self) -> int | None:
        """Packed version of the bound weights."""
        ...

    @property
    def running(self) -> int:
        """Sequences that hold a place."""
        ...

    @property
    def waiting(self) -> int:
        """Requests without a place yet."""
        ...

    @property
    def tokens_generated(self) -> int:
        """Response tokens sampled since the engine was made."""
        ...


# ---- rollout side ---------------------------------------------------------------------------------------------------


class PromptSource(Protocol):
    """Prompts for training in a seeded order, without end unless the data ends; validation prompts as a list."""

    def next_prompt(self) -> Prompt | None:
        """None: there is none yet. Raises PromptError: the row that came up cannot be used; the next one follows it."""
        ...

    def validation_prompts(self) -> Sequence[Prompt]: ...

    def state(self) -> msgspec.Struct:
        """Where the source stands, for a checkpoint."""
        ...


class RewardFn(Protocol):
    """Scores one response: a number, or a number with metrics. May raise anything; it costs this response alone."""

    async def score(self, prompt: Prompt, response_text: str) -> float | Score: ...


@runtime_checkable
class PreparedReward(RewardFn, Protocol):
    """One that has to be made ready for a call, by starting a process for example: no deadline counts that time."""

    async def ready(self) -> None:
        """Return once a call would be taken up at once. Raises RewardError: that will not happen."""
        ...


class PromptRenderer(Protocol):
    """A prompt as the model is asked it."""

    def render(self, prompt: Sequence[Mapping[str, str]] | str) -> tuple[str, list[int]]:
        """Text and token ids of a chat (messages with role and content), or of a text that is used as it is.

        Raises ValueError: the model's chat template does not take this chat.
        """
        ...


class TextDecoder(Protocol):
    """Token ids to text, for rewards and people only."""

    def decode(self, token_ids: Sequence[int]) -> str: ...


class ReplicaControl(Protocol):
    """A replica as the rollouter and the checkpoint engine manager see it (an actor handle, or the object itself)."""

    @property
    def replica_id(self) -> str: ...

    async def exchange(self, request: ExchangeRequest) -> ExchangeReply: ...

    async def stage(self, command: StageCommand) -> StageReport: ...

    async def swap(self, command: SwapCommand) -> SwapReport:
        """Pause between two decode steps, swap, prove, resume; all of it inside the replica."""
        ...

    async def discard_staged(self, version: int) -> None:
        """Forget a staged version that will not be swapped in; unknown versions are ignored."""
        ...

    async def pin(self, version: int, deadline_wall: float | None = None) -> bool:
        """Keep this version servable for requests with `pinned_version`; False when it is not the served one.

        Raises LateCommand after `deadline_wall` (unix seconds): nobody would unpin it.
        """
        ...

    async def unpin(self, version: int) -> None: ...

    async def pause(self) -> None:
        """After this returns no decode step runs until `resume`; idempotent."""
        ...

    async def resume(self) -> None:
        """Idempotent."""
        ...

    async def report(self) -> ReplicaReport: ...


# ---- the parts as the synchronizer and the task runner see them -----------------------------------------------------


class TrainerControl(Protocol):
    """`FullyAsyncTrainer` as the synchronizer sees it."""

    async def capture_weights(self, command: CaptureCommand) -> CaptureReport:
        """Take the snapshot; the optimiser is free once this returns."""
        ...

    async def publish_weights(self, command: PublishCommand) -> PublishReport:
        """Encode and publish what was captured, beside the next step."""
        ...


class RolloutControl(Protocol):
    """`FullyAsyncRollouter` as the synchronizer sees it."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def update_param_version(
        self, version: int, validate: bool, global_steps: int, use_trainer_do_validate: bool
    ) -> None: ...

    async def confirm_replicas(self, confirmed: Mapping[str, int], fenced: Mapping[str, str]) -> None:
        """These replicas serve these versions (packed) and get traffic; those are fenced, with the reason."""
        ...

    async def add_replica(self, replica: ReplicaControl) -> None: ...

    async def remove_replica(self, replica_id: str) -> None: ...

    async def lose_replica(self, replica_id: str, reason: str) -> None:
        """A replica is dead or does not answer; what it owed is handed over. Twice is harmless."""
        ...

    async def save_checkpoint(self, local_global_step_folder: str) -> None:
        """Write the rollouter's part of a checkpoint into this directory."""
        ...

    async def wait_validations(self) -> None:
        """Return once no validation runs or is waiting."""
        ...

    def get_rollout_wg(self) -> Sequence[ReplicaControl]:
        """The replicas."""
        ...


class SampleSource(Protocol):
    """`FullyAsyncRollouter` as the trainer sees it."""

    async def outstanding_before(self, version: int, consumed: Sequence[str]) -> list[str]:
        """Ids of samples that are still on their way and may hold tokens older than `version` (packed). `consumed`
        are the samples that the trainer has taken since it last asked.
        """
        ...

    async def version_captured(self, version: int, trained: int) -> None:
        """This version (packed) is about to be captured, after `trained` samples of the surviving lineage: what the
        trainer takes from now on counts in the version's window.
        """
        ...

    async def samples_dropped(self, sample_ids: Sequence[str]) -> None:
        """The trainer dropped these samples; others are to be made in their place."""
        ...

    async def snapshot(self) -> bytes:
        """All that is on its way here at one moment (`core.checkpoint.RollouterSnapshot`, encoded)."""
        ...


class SnapshotSource(Protocol):
    """`FullyAsyncTrainer` as its side of validations sees it."""

    async def captured_manifest(self, version: int) -> WeightManifest:
        """The manifest of this captured version (packed). Raises SyncError: it is not among the newest."""
        ...


class TrainerSide(Protocol):
    """The trainer's side of a validation, as the rollouter sees it."""

    async def generate(
        self, version: int, requests: Sequence[GenerationRequest], deadline_wall: float
    ) -> list[Completion]:
        """Responses of exactly this version (packed). Raises PacelineError: none was made; others have to do it."""
        ...


class SynchronizerControl(Protocol):
    """`ParameterSynchronizer` as the trainer sees it."""

    async def sync_weights(
        self, version: int, validate: bool = False, global_steps: int = 0, use_trainer_do_validate: bool = False
    ) -> SyncReport: ...

    async def wait_last_valid(self) -> None: ...


class QueueControl(Protocol):
    """`MessageQueue` as all others see it. Items are opaque bytes (`core.sample.encode_sample`)."""

    async def put_samples(self, items: Sequence[bytes]) -> int:
        """Wait for room, then append all; returns the queue length."""
        ...

    async def get_samples(self, count: int, wait_seconds: float) -> tuple[list[bytes], int]:
        """Up to `count` items, as soon as at least one is there or the wait is over, and the queue length left.

        Raises QueueClosed once closed and drained, ProducerFailed when a producer failed.
        """
        ...

    async def peek_samples(self) -> list[bytes]:
        """Everything in the queue, oldest first; nothing is taken."""

    async def put_validate(self, result: bytes) -> None:
        """Leave a validation result (`core.commands.ValidationResult`, as msgpack) for the trainer."""
        ...

    async def get_validate(self) -> bytes | None:
        """The oldest validation result that nobody has taken, or None."""
        ...

    async def update_param_version(self, version: int) -> None: ...

    async def get_statistics(self) -> QueueStatistics: ...

    async def finish(self, producer: str) -> None:
        """This producer has put its last sample."""
        ...

    async def fail(self, producer: str, error: str) -> None:
        """This producer failed; consumers get ProducerFailed once the queue is drained."""
        ...


class RolloutLog(Protocol):
    """The record of every response, per version at which it ended."""

    def record(self, sample: Sample, version: int, fate: Literal["trained", "dropped", "failed"]) -> None: ...

    def flush(self) -> None:
        """Write out what was recorded."""
        ...
