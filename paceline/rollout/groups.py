"""Groups: the samples in flight, each a prompt with n responses that come back one by one in any order.

A request is `<sample id>/<index>~<attempt>`: when its replica is lost it is issued again as the next attempt, and
what the lost one may still deliver is refused (a zombie), so no response is ever filed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from paceline.core.sample import Completion, GenerationRequest, Prompt, SamplingParams


@dataclass(slots=True)
class Group:
    """One sample in flight. `attempts[i]` is the current attempt at response i, `losses` counts lost replicas."""

    sample_id: str
    prompt: Prompt
    completions: list[Completion | None]
    attempts: list[int]
    losses: int = 0

    @property
    def missing(self) -> int:
        """Responses that have not come back."""
        return self.completions.count(None)


class Groups:
    """Opens groups, takes completions, gives back groups that are whole."""

    def __init__(self, *, responses: int, params: SamplingParams) -> None:
        self._responses = responses
        self._params = params
        self._open: dict[str, Group] = {}
        self.zombies = 0

    def __len__(self) -> int:
        return len(self._open)

    def open(self, sample_id: str, prompt: Prompt) -> list[GenerationRequest]:
        """Begin a group; returns its requests."""
        self._open[sample_id] = Group(sample_id, prompt, [None] * self._responses, [0] * self._responses)
        return [
            GenerationRequest(
                request_id=f"{sample_id}/{index}~0", prompt_ids=list(prompt.token_ids), params=self._params
            )
            for index in range(self._responses)
        ]

    def take(self, completions: Sequence[Completion]) -> list[Group]:
        """File completions; returns the groups that became whole and forgets them.

        A completion of an earlier attempt, or of a group that is closed, is counted as a zombie and refused.
        """
        whole: list[Group] = []
        for completion in completions:
            sample_id, index, attempt = _parse(completion.request_id)
            group = self._open.get(sample_id)
            if group is None or group.completions[index] is not None or group.attempts[index] != attempt:
                self.zombies += 1
                continue
            group.completions[index] = completion
            if group.missing == 0:
                whole.append(self._open.pop(sample_id))
        return whole

    def reissue(self, lost: Sequence[GenerationRequest]) -> dict[str, list[GenerationRequest]]:
        """The next attempt at requests whose replica is lost, by sample; each sample's loss is counted once."""
        again: dict[str, list[GenerationRequest]] = {}
        for request in lost:
            sample_id, index, attempt = _parse(request.request_id)
            group = self._open.get(sample_id)
            if group is None or group.completions[index] is not None or group.attempts[index] != attempt:
                continue
            group.attempts[index] += 1
            if sample_id not in again:
                group.losses += 1
            fresh = msgspec.structs.replace(request, request_id=f"{sample_id}/{index}~{attempt + 1}")
            again.setdefault(sample_id, []).append(fresh)
        return again

    def losses(self, sample_id: str) -> int:
        """How many replicas this sample has lost."""
        return self._open[sample_id].losses

    def close(self, sample_id: str) -> None:
        """Give a sample up; whatever still comes for it is refused."""
        self._open.pop(sample_id, None)


def _parse(request_id: str) -> tuple[str, int, int]:
    sample_id, _, place = request_id.rpartition("/")
    index, _, attempt = place.partition("~")
    return sample_id, int(index), int(attempt)
