"""Seams of checkpoints: what the loops are handed to keep what they have. The rest of the ports is in `core.ports`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from paceline.core.sample import GenerationRequest, StepTokens


class CheckpointStore(Protocol):
    """Where the checkpoints of a run are; each one is whole or not there. Blocking: to be called through `Work`."""

    def begin(self) -> None:
        """The cut is about to be taken: what the token journal has closed may go once the next `save` is whole."""
        ...

    def save(self, step: int, write_state: Callable[[str], bool], parts: Mapping[str, bytes]) -> int:
        """Write a checkpoint, then remove those beyond the number to keep; returns its bytes.

        `write_state` is given a directory to write into and tells whether all numbers are finite; `parts` are further
        files by name. Raises CheckpointError: nothing has changed, the checkpoints before are whole.
        """
        ...


class TokenJournal(Protocol):
    """Append-only record of the tokens that a replica makes, for a resume. `begin` and `forget` come from the event
    loop, `append` from the thread that decodes. Nothing raises: a journal that cannot write ends.
    """

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """The replica has taken these requests, with the tokens that they carry."""
        ...

    def append(self, step: StepTokens) -> None:
        """One decode step."""
        ...

    def forget(self, request_ids: Sequence[str]) -> None:
        """Whoever asked for these has all their tokens."""
        ...

    def close(self) -> None: ...


class NoJournal:
    """The journal of a run that keeps none."""

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """Nothing."""

    def append(self, step: StepTokens) -> None:
        """Nothing."""

    def forget(self, request_ids: Sequence[str]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
