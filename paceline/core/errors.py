"""Every error that paceline raises on purpose.

    PacelineError
    |-- ConfigError                 refused before anything starts (exit code 2)
    |   `-- CapacityError           not enough memory for what was asked (needed and free are in the message)
    |-- VersionError                a version that would go backwards, or tokens from the future
    |-- SyncError                   a weight sync did not reach all replicas
    |   |-- CoverageError           tensors missing, doubled, undeclared or of another shape or dtype
    |   |-- DigestMismatch          what arrived is not what was published
    |   |-- NonFiniteWeights        NaN or infinity in weights that were about to be published
    |   |-- LateCommand             a command that came after its deadline or for another life; refused by the receiver
    |   `-- Superseded              a newer sync took this one's place
    |-- DeadlineExceeded            a wait ended at its deadline; names who waited for whom
    |-- WorkerDied                  a process of the run is gone (replica, trainer, queue, ...)
    |-- QueueClosed                 the queue has ended and is drained: end of data, not a failure
    |-- ProducerFailed              the producer of samples failed; carries its message
    |-- CheckpointError             a checkpoint could not be written, or is torn, truncated or foreign
    |-- PromptError                 a row of a data set cannot become a prompt; `prompt_id` names it
    |-- RewardError                 a reward function failed for one response
    |   `-- RewardTimeout           it gave no answer before its deadline
    `-- RunInterrupted              the run was asked to stop (Ctrl-C, SIGTERM)

All take positional arguments only and keep them in `args`, so each survives pickling between processes.
"""

from __future__ import annotations


class PacelineError(Exception):
    """Root of the tree. `args[0]` is one line that says what happened and what to do."""

    @property
    def message(self) -> str:
        """The one line for a person."""
        return str(self.args[0]) if self.args else type(self).__name__


class ConfigError(PacelineError):
    """A configuration that cannot run; raised before any process starts."""


class CapacityError(ConfigError):
    """Too little memory; the message has the bytes needed and the bytes free."""


class VersionError(PacelineError):
    """A version that would go backwards, or a token newer than the weights it is compared with."""


class SyncError(PacelineError):
    """A weight sync failed; replicas serve what they served before unless the message fences one."""


class CoverageError(SyncError):
    """The sent tensors and the engine's tensors do not match one to one; all offending names are in the message."""


class DigestMismatch(SyncError):
    """The digest of received or served weights differs from the published one."""


class NonFiniteWeights(SyncError):
    """NaN or infinity in weights before publication; names the tensor and the count."""


class LateCommand(SyncError):
    """A command reached its receiver after its deadline, or belongs to another life; nothing was done."""


class Superseded(SyncError):
    """A newer sync of the same run took this one's place before it was staged."""


class DeadlineExceeded(PacelineError):
    """`args[1]` names the culprit, `args[2]` is the deadline in seconds."""

    @property
    def culprit(self) -> str:
        """Who was waited for."""
        return str(self.args[1]) if len(self.args) > 1 else "unknown"


class WorkerDied(PacelineError):
    """A process of the run is gone; `args[1]` is its role (for example `replica-1`)."""

    @property
    def worker(self) -> str:
        """Role of the process that is gone."""
        return str(self.args[1]) if len(self.args) > 1 else "unknown"


class QueueClosed(PacelineError):
    """End of data: the queue is closed and drained."""


class ProducerFailed(PacelineError):
    """The producer of samples failed; its own message is in this one."""


class CheckpointError(PacelineError):
    """A checkpoint could not be written, or cannot be used; the message says which and why."""


class PromptError(PacelineError):
    """A row that cannot become a prompt; `args[1]` is the prompt's id, the message names file and row."""

    @property
    def prompt_id(self) -> str:
        """Id that the prompt would have had."""
        return str(self.args[1]) if len(self.args) > 1 else "unknown"


class RewardError(PacelineError):
    """A reward could not be computed for one response."""


class RewardTimeout(RewardError):
    """A reward function gave no answer within `reward.timeout_seconds`."""


class RunInterrupted(PacelineError):
    """`args[1]` is the signal's number."""

    @property
    def signal_number(self) -> int:
        """The signal that asked for the stop."""
        return int(self.args[1]) if len(self.args) > 1 else 2
