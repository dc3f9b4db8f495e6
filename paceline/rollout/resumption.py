"""What a resumed life begins with on the rollout side: the samples that were on their way, and the tokens they have.

A response goes on from what the token journals hold of it: of the latest life that had it and is of this lineage, the
latest attempt, up to the first token whose version is lost. None of that depends on what was generated, so lengths
are not biased. The journals know samples by their number over all lives, and so also those that were admitted after the
checkpoint: they are admitted again, under a new id, and go on.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paceline.core.checkpoint import JournalledSequence, OpenGroup, Partial, RollouterSnapshot, prompt_checksum
from paceline.core.config import Config
from paceline.core.sample import Completion, Prompt, Sample, sample_number
from paceline.core.version import Lineage, Version
from paceline.rollout.groups import Group, Groups, parse_request_id
from paceline.rollout.sampling_params import training_params


class Partials:
    """Tokens of unfinished responses, by sample number and index; each is given out once."""

    def __init__(self, sequences: Sequence[JournalledSequence], lineage: Lineage) -> None:
        self._lineage = lineage
        chosen: dict[tuple[int, int], tuple[int, int, JournalledSequence]] = {}
        for sequence in sequences:
            if sequence.life not in lineage.ancestors:
                continue
            sample_id, index, attempt = parse_request_id(sequence.request_id)
            key = (sample_number(sample_id), index)
            held = chosen.get(key)
            if held is None or (sequence.life, attempt) >= held[:2]:
                chosen[key] = (sequence.life, attempt, sequence)
        self._sequences = {key: sequence for key, (_, _, sequence) in chosen.items()}

    def take(self, sample_id: str, index: int, prompt: Prompt) -> Partial | None:
        """What this response has already, None when it begins anew."""
        sequence = self._sequences.pop((sample_number(sample_id), index), None)
        if sequence is None or sequence.prompt_check != prompt_checksum(prompt.token_ids):
            return None
        return surviving(sequence.tokens, self._lineage)


def surviving(tokens: Partial, lineage: Lineage) -> Partial | None:
    """The tokens before the first whose version is lost; None when there are none."""
    kept = len(tokens)
    for place, version in enumerate(tokens.versions):
        if not lineage.holds(Version.unpack(version)):
            kept = place
            break
    return Partial(tokens.token_ids[:kept], tokens.logprobs[:kept], tokens.versions[:kept]) if kept else None


class Resumption:
    """A snapshot of an earlier life, to be gone on from in the life of `lineage`.

    Without `sequences` nothing goes on: with `partial_rollout` off a response is of one version, and begins anew.
    """

    def __init__(
        self, snapshot: RollouterSnapshot, lineage: Lineage, sequences: Sequence[JournalledSequence] | None
    ) -> None:
        self._lineage = lineage
        self._goes_on = sequences is not None
        self.snapshot = snapshot
        self.partials = Partials(sequences or (), lineage)

    def ready(self) -> tuple[list[Sample], list[Sample]]:
        """Samples that only have to reach the trainer, as of this life; and those that hold a lost token."""
        whole: list[Sample] = []
        lost: list[Sample] = []
        for sample in self.snapshot.ready:
            versions = {version for response in sample.responses for version in response.versions}
            held = all(self._lineage.holds(Version.unpack(version)) for version in versions)
            (whole if held else lost).append(msgspec.structs.replace(sample, life=self._lineage.life))
        return whole, lost

    def groups(self) -> list[Group]:
        """Samples in flight, each response with what it has."""
        return [self._group(group) for group in self.snapshot.groups]

    def admitted_under(self) -> dict[str, int]:
        """Packed version under which each open sample was admitted, in terms of this life: n goes on over lives. One of
        which that was not kept counts as admitted under the first.
        """
        known = self.snapshot.admitted_under
        n_of = {name: Version.unpack(max(0, known.get(name, 0))).n for name in self.snapshot.open_ids}
        return {name: Version(self._lineage.life, n).packed for name, n in n_of.items()}

    def _group(self, group: OpenGroup) -> Group:
        completions = [self._kept(completion) for completion in group.completions]
        carried: list[Partial | None] = []
        for index, (completion, issued) in enumerate(zip(completions, group.carried, strict=True)):
            known = self.partials.take(group.sample_id, index, group.prompt)
            if completion is not None or not self._goes_on:
                carried.append(None)
            else:
                carried.append(known or (issued and surviving(issued, self._lineage)) or None)
        attempts = [0] * len(completions)
        given_up = set(group.given_up)
        return Group(group.sample_id, group.prompt, completions, attempts, carried, group.losses, given_up)

    def _kept(self, completion: Completion | None) -> Completion | None:
        if completion is None or not all(self._lineage.holds(Version.unpack(v)) for v in completion.versions):
            return None
        return completion


def training_groups(config: Config, stop_token_ids: tuple[int, ...], resumption: Resumption | None) -> Groups:
    """The groups of a run, as configured; they know the tokens that earlier lives have made."""
    return Groups(
        responses=config.rollout.n,
        params=training_params(config, stop_token_ids),
        known=None if resumption is None else resumption.partials,
        longest=config.max_model_len,
        on_abort="continue" if config.async_training.partial_rollout else "restart",
        policy=config.rollout.group_policy,
    )
