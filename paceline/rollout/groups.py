"""Groups: the samples in flight, each a prompt with n responses that come back one by one in any order.

A request is `<sample id>/<index>~<attempt>`: when its replica is lost it is issued again as the next attempt, and
what the lost one may still deliver is refused (a zombie), so no response is ever filed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import msgspec

from paceline.core.checkpoint import OpenGroup, Partial
from paceline.core.sample import Completion, GenerationRequest, Prompt, SamplingParams


@dataclass(slots=True)
class Group:
    """One sample in flight. `attempts[i]` is the current attempt at response i, `carried[i]` what it was issued with
    (None: nothing), `losses` counts lost replicas.
    """

    sample_id: str
    prompt: Prompt
    completions: list[Completion | None]
    attempts: list[int]
    carried: list[Partial | None]
    losses: int = 0

    @property
    def missing(self) -> int:
        """Responses that have not come back."""
        return self.completions.count(None)

    def as_open(self) -> OpenGroup:
        """For a checkpoint."""
        return OpenGroup(self.sample_id, self.prompt, list(self.completions), list(self.carried), self.losses)


class KnownTokens(Protocol):
    """Tokens that an earlier life has made of a response."""

    def take(self, sample_id: str, index: int, prompt: Prompt) -> Partial | None: ...


class NoTokens:
    """Of a run that was not resumed."""

    def take(self, sample_id: str, index: int, prompt: Prompt) -> Partial | None:
        """None."""
        return None


class Taken(NamedTuple):
    """What came of completions: whole groups, requests to send again, samples refused by an engine with the reason, and
    how many completions nobody waited for.
    """

    whole: list[Group]
    again: list[GenerationRequest]
    refused: dict[str, str]
    zombies: int


class Groups:
    """Opens groups, takes completions, gives back groups that are whole.

    `longest` bounds prompt and response together, in tokens. An aborted response goes on from the tokens that it has
    (`continue`), or from the untouched prompt, so that it is of one version (`restart`).
    """

    def __init__(
        self,
        *,
        responses: int,
        params: SamplingParams,
        known: KnownTokens | None = None,
        longest: int | None = None,
        on_abort: Literal["continue", "restart"] = "restart",
    ) -> None:
        self._responses = responses
        self._params = params
        self._known = known or NoTokens()
        self._longest = longest
        self._on_abort = on_abort
        self._open: dict[str, Group] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, sample_id: str, prompt: Prompt) -> list[GenerationRequest]:
        """Begin a group; returns its requests."""
        carried = [self._known.take(sample_id, index, prompt) for index in range(self._responses)]
        return self.restore(Group(sample_id, prompt, [None] * self._responses, [0] * self._responses, carried))

    def restore(self, group: Group) -> list[GenerationRequest]:
        """Take in a group that lacks responses; returns the requests for those."""
        self._open[group.sample_id] = group
        return [self._request(group, index) for index, completion in enumerate(group.completions) if completion is None]

    def all_open(self) -> list[Group]:
        """Groups that lack responses, oldest first."""
        return list(self._open.values())

    def _request(self, group: Group, index: int) -> GenerationRequest:
        tokens = group.carried[index] or Partial([], [], [])
        return GenerationRequest(
            request_id=f"{group.sample_id}/{index}~{group.attempts[index]}",
            prompt_ids=list(group.prompt.token_ids),
            params=self._params_for(group.prompt),
            response_ids=list(tokens.token_ids),
            logprobs=list(tokens.logprobs),
            versions=list(tokens.versions),
        )

    def take(self, completions: Sequence[Completion]) -> Taken:
        """File completions; whole groups and refused ones are forgotten.

        An aborted one is issued again, as the next attempt and with its remaining budget. A completion of an earlier
        attempt, or of a group that is closed, is a zombie and is not filed.
        """
        taken = Taken([], [], {}, 0)
        for completion in completions:
            sample_id, index, attempt = parse_request_id(completion.request_id)
            group = self._open.get(sample_id)
            if group is None or group.completions[index] is not None or group.attempts[index] != attempt:
                taken = taken._replace(zombies=taken.zombies + 1)
                continue
            if completion.finish_reason == "error":
                taken.refused[sample_id] = completion.error
                self.close(sample_id)
                continue
            if completion.finish_reason == "abort" and not self._is_complete(group, completion):
                taken.again.append(self._again(group, index, completion))
                continue
            group.completions[index] = completion
            if group.missing == 0:
                taken.whole.append(self._open.pop(sample_id))
        return taken

    def _params_for(self, prompt: Prompt) -> SamplingParams:
        budget = self._budget(prompt)
        if budget == self._params.max_tokens:
            return self._params
        return msgspec.structs.replace(self._params, max_tokens=budget)

    def _again(self, group: Group, index: int, aborted: Completion) -> GenerationRequest:
        if self._on_abort == "continue":
            group.carried[index] = Partial(aborted.token_ids, aborted.logprobs, aborted.versions)
        group.attempts[index] += 1
        return self._request(group, index)

    def _is_complete(self, group: Group, completion: Completion) -> bool:
        """Aborted at its very last token: no request for nothing is sent."""
        if self._on_abort == "restart" or len(completion.token_ids) < self._budget(group.prompt):
            return False
        completion.finish_reason = "length"
        return True

    def _budget(self, prompt: Prompt) -> int:
        """Most tokens of a response to this prompt, those that it carries included."""
        room = self._params.max_tokens if self._longest is None else self._longest - len(prompt.token_ids)
        return min(self._params.max_tokens, room)

    def reissue(self, lost: Sequence[GenerationRequest]) -> dict[str, list[GenerationRequest]]:
        """The next attempt at requests whose replica is lost, by sample; each sample's loss is counted once."""
        again: dict[str, list[GenerationRequest]] = {}
        for request in lost:
            sample_id, index, attempt = parse_request_id(request.request_id)
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


def parse_request_id(request_id: str) -> tuple[str, int, int]:
    """Sample id, index of the response, attempt."""
    sample_id, _, place = request_id.rpartition("/")
    index, _, attempt = place.partition("~")
    return sample_id, int(index), int(attempt)
