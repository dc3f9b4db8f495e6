"""Groups: the samples in flight, each a prompt with n responses that come back one by one in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.sample import Completion, GenerationRequest, Prompt, SamplingParams


@dataclass(slots=True)
class Group:
    """One sample in flight."""

    sample_id: str
    prompt: Prompt
    completions: list[Completion | None]
    missing: int


class Groups:
    """Opens groups, takes completions, gives back groups that are whole. Request ids are `<sample id>/<index>`."""

    def __init__(self, *, responses: int, params: SamplingParams) -> None:
        self._responses = responses
        self._params = params
        self._open: dict[str, Group] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, sample_id: str, prompt: Prompt) -> list[GenerationRequest]:
        """Begin a group; returns its requests."""
        self._open[sample_id] = Group(sample_id, prompt, [None] * self._responses, self._responses)
        return [
            GenerationRequest(request_id=f"{sample_id}/{index}", prompt_ids=list(prompt.token_ids), params=self._params)
            for index in range(self._responses)
        ]

    def take(self, completions: Sequence[Completion]) -> list[Group]:
        """File completions; returns the groups that became whole and forgets them. A completion that came before, or
        whose group is closed, is ignored.
        """
        whole: list[Group] = []
        for completion in completions:
            sample_id, _, index = completion.request_id.rpartition("/")
            group = self._open.get(sample_id)
            if group is None or group.completions[int(index)] is not None:
                continue
            group.completions[int(index)] = completion
            group.missing -= 1
            if group.missing == 0:
                whole.append(self._open.pop(sample_id))
        return whole
