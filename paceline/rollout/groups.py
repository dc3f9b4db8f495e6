"""Groups: the samples in flight, each a prompt with n responses that come back one by one in any order.

A request is `<sample id>/<index>~<attempt>`: when its replica is lost it is issued again as the next attempt, and
what the lost one may still deliver is refused (a zombie), so no response is ever filed twice. A response that cannot be
made ends its group, or is given up while the others go on (`rollout.group_policy`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import msgspec

from paceline.core.checkpoint import OpenGroup, Partial
from paceline.core.sample import Completion, GenerationRequest, Prompt, SamplingParams

LEAST_SURVIVORS = 2  # fewer responses cannot be compared with each other


@dataclass(slots=True)
class Group:
    """One sample in flight. `attempts[i]` is the current attempt at response i, `carried[i]` what it was issued with
    (None: nothing), `losses` counts lost replicas, `given_up` has the responses that cannot be made.
    """

    sample_id: str
    prompt: Prompt
    completions: list[Completion | None]
    attempts: list[int]
    carried: list[Partial | None]
    losses: int = 0
    given_up: set[int] = field(default_factory=set)

    @property
    def missing(self) -> int:
        """Responses that have not come back and still may."""
        return len(self.awaited)

    @property
    def awaited(self) -> list[int]:
        """Indices of those."""
        return [i for i, completion in enumerate(self.completions) if completion is None and i not in self.given_up]

    def as_open(self) -> OpenGroup:
        """For a checkpoint."""
        return OpenGroup(
            self.sample_id,
            self.prompt,
            list(self.completions),
            list(self.carried),
            self.losses,
            sorted(self.given_up),
        )


class KnownTokens(Protocol):
    """Tokens that an earlier life has made of a response."""

    def take(self, sample_id: str, index: int, prompt: Prompt) -> Partial | None: ...


class NoTokens:
    """Of a run that was not resumed."""

    def take(self, sample_id: str, index: int, prompt: Prompt) -> Partial | None:
        """None."""
        return None


class Taken(NamedTuple):
    """What came of completions: whole groups, groups that go on with their survivors and the engine's reason, requests
    to send again, samples refused by an engine with the reason, and how many completions nobody waited for.
    """

    whole: list[Group]
    reduced: list[tuple[Group, str]]
    again: list[GenerationRequest]
    refused: dict[str, str]
    zombies: int


class GivenUp(NamedTuple):
    """A sample whose missing responses cannot be made: the group if it goes on with its survivors, the lengths of the
    responses that it had, and the requests that nobody waits for any more.
    """

    survivors: Group | None
    lengths: dict[int, int]
    unwanted: list[str]


class Groups:
    """Opens groups, takes completions, gives back groups that are whole.

    `longest` bounds prompt and response together, in tokens. An aborted response goes on from the tokens that it has
    (`continue`), or from the untouched prompt, so that it is of one version (`restart`). When a response cannot be
    made, `policy` ends the group (`retry`) or lets at least two survivors go on (`survivors`).
    """

    def __init__(
        self,
        *,
        responses: int,
        params: SamplingParams,
        known: KnownTokens | None = None,
        longest: int | None = None,
        on_abort: Literal["continue", "restart"] = "restart",
        policy: Literal["retry", "survivors"] = "retry",
    ) -> None:
        self._responses = responses
        self._params = params
        self._known = known or NoTokens()
        self._longest = longest
        self._on_abort = on_abort
        self._policy = policy
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
        return [self._request(group, index) for index in group.awaited]

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
        taken = Taken([], [], [], {}, 0)
        for completion in completions:
            awaited = self._awaited(completion.request_id)
            if awaited is None:
                taken = taken._replace(zombies=taken.zombies + 1)
                continue
            group, index = awaited
            if completion.finish_reason == "error":
                self._refuse(group, index, completion.error, taken)
                continue
            if completion.finish_reason == "abort" and not self._is_complete(group, completion):
                taken.again.append(self._again(group, index, completion))
                continue
            group.completions[index] = completion
            if group.missing == 0:
                self.close(group.sample_id)
                if group.given_up:
                    self._survive(group, "refused by its engine", taken)
                else:
                    taken.whole.append(group)
        return taken

    def awaits(self, request_id: str) -> bool:
        """Whether a completion of this request would be filed."""
        return self._awaited(request_id) is not None

    def _awaited(self, request_id: str) -> tuple[Group, int] | None:
        """The group and the index of the response that this request is for; None: nobody waits for it."""
        sample_id, index, attempt = parse_request_id(request_id)
        group = self._open.get(sample_id)
        if group is None or index not in group.awaited or group.attempts[index] != attempt:
            return None
        return group, index

    def _refuse(self, group: Group, index: int, error: str, taken: Taken) -> None:
        """An engine cannot make this response."""
        group.given_up.add(index)
        if self._policy == "retry":  # it would be refused again
            self.close(group.sample_id)
            taken.refused[group.sample_id] = error
        elif group.missing == 0:
            self.close(group.sample_id)
            self._survive(group, error, taken)

    def _survive(self, group: Group, error: str, taken: Taken) -> None:
        if self._enough_survive(group):
            taken.reduced.append((group, error))
        else:
            taken.refused[group.sample_id] = error

    def _enough_survive(self, group: Group) -> bool:
        return len(group.completions) - group.completions.count(None) >= LEAST_SURVIVORS

    def give_up(self, sample_id: str) -> GivenUp | None:
        """What is missing of this sample cannot be made; None when it lacks nothing any more."""
        group = self._open.pop(sample_id, None)
        if group is None:
            return None
        unwanted = [f"{sample_id}/{index}~{group.attempts[index]}" for index in group.awaited]
        group.given_up.update(group.awaited)
        goes_on = self._policy == "survivors" and self._enough_survive(group)
        lengths = dict(Counter(len(completion.token_ids) for completion in group.completions if completion is not None))
        return GivenUp(group if goes_on else None, lengths, unwanted)

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
            awaited = self._awaited(request.request_id)
            if awaited is None:
                continue
            group, index = awaited
            group.attempts[index] += 1
            if group.sample_id not in again:
                group.losses += 1
            request_id = f"{group.sample_id}/{index}~{group.attempts[index]}"
            fresh = msgspec.structs.replace(request, request_id=request_id)
            again.setdefault(group.sample_id, []).append(fresh)
        return again

    def is_open(self, sample_id: str) -> bool:
        """Whether this sample lacks responses."""
        return sample_id in self._open

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
