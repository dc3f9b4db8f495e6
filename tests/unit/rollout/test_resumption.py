"""What a resumed life begins with: which tokens of which journal, and what is lost."""

from __future__ import annotations

from paceline.core.checkpoint import (
    JournalledSequence,
    OpenGroup,
    Partial,
    RollouterSnapshot,
    prompt_checksum,
)
from paceline.core.sample import Completion, Prompt, Response, Sample
from paceline.core.version import Lineage, Version
from paceline.rollout.resumption import Partials, Resumption

PROMPT = Prompt("p", "?", (1, 2, 3), "", "t")
LINEAGE = Lineage(3, 4, {1: 4, 2: 4})  # life 2 went on from the same checkpoint, of version 1.4, and left nothing


def tokens(*versions: tuple[int, int]) -> Partial:
    packed = [Version(life, n).packed for life, n in versions]
    return Partial(list(range(len(packed))), [-0.5] * len(packed), packed)


def journalled(life: int, request_id: str, *versions: tuple[int, int], prompt: Prompt = PROMPT) -> JournalledSequence:
    return JournalledSequence(life, request_id, prompt_checksum(prompt.token_ids), tokens(*versions))


def taken(*sequences: JournalledSequence, sample_id: str = "3-7", index: int = 0) -> int | None:
    found = Partials(sequences, LINEAGE).take(sample_id, index, PROMPT)
    return None if found is None else len(found)


def test_a_response_goes_on_up_to_its_first_lost_token() -> None:
    assert taken(journalled(1, "1-7/0~0", (1, 3), (1, 4), (1, 5), (1, 5))) == 2
    assert taken(journalled(1, "1-7/0~0", (1, 5))) is None
    assert taken(journalled(2, "1-7/0~0", (1, 4), (2, 4), (2, 5))) == 2


def test_the_latest_life_and_in_it_the_latest_attempt_count_not_the_longest() -> None:
    first, second = journalled(1, "1-7/0~0", *[(1, 4)] * 5), journalled(2, "2-7/0~0", *[(2, 4)] * 2)
    assert taken(first, second) == taken(second, first) == 2
    again = journalled(2, "2-7/0~1", (2, 4))
    assert taken(second, again) == taken(again, second) == 1


def test_a_life_outside_the_lineage_does_not_count() -> None:
    foreign = journalled(9, "9-7/0~0", (1, 4), (1, 4), (9, 4))
    assert taken(foreign) is None
    assert taken(foreign, journalled(1, "1-7/0~0", (1, 4))) == 1


def test_another_prompt_or_place_gets_nothing() -> None:
    other = Prompt("q", "?", (9, 9), "", "t")
    assert taken(journalled(1, "1-7/0~0", (1, 4), prompt=other)) is None
    assert taken(journalled(1, "1-7/1~0", (1, 4))) is None
    assert taken(journalled(1, "1-8/0~0", (1, 4))) is None


def test_tokens_are_given_out_once() -> None:
    partials = Partials([journalled(1, "1-7/0~0", (1, 4))], LINEAGE)
    assert partials.take("3-7", 0, PROMPT) is not None
    assert partials.take("3-7", 0, PROMPT) is None


def completion(*versions: tuple[int, int]) -> Completion:
    made = tokens(*versions)
    return Completion("1-7/0~0", made.token_ids, made.logprobs, made.versions, "stop")


def ready(number: int, *versions: tuple[int, int]) -> Sample:
    made = tokens(*versions)
    response = Response(made.token_ids, made.logprobs, made.versions, "stop", "", 1.0)
    return Sample(f"1-{number}", 1, PROMPT, [response])


def test_groups_keep_what_is_finished_and_the_others_go_on() -> None:
    group = OpenGroup("1-7", PROMPT, [completion((1, 4)), None, None, None], [None, None, tokens((1, 2)), None], 2)
    snapshot = RollouterSnapshot(1, 9, 1, 0, b"", [group], [ready(5, (1, 4)), ready(6, (1, 5))], {"1-7": 0, "1-2": 0})
    resumption = Resumption(snapshot, LINEAGE, [journalled(1, "1-7/1~0", (1, 4), (1, 5))])
    (restored,) = resumption.groups()
    assert restored.completions[0] == group.completions[0]
    assert [None if one is None else len(one) for one in restored.carried] == [None, 1, 1, None]
    assert (restored.missing, restored.losses) == (3, 2)
    whole, lost = resumption.ready()
    assert [(one.sample_id, one.life) for one in whole] == [("1-5", 3)]
    assert [one.sample_id for one in lost] == ["1-6"]
    assert snapshot.taken == 9 - 1 - 3


def test_ages_are_counted_on_in_the_new_life() -> None:
    admitted_under = {"1-7": Version(1, 2).packed, "1-8": -1, "1-3": Version(1, 1).packed}
    groups = [OpenGroup(f"1-{number}", PROMPT, [None], [None], 0) for number in (7, 8)]
    resumption = Resumption(RollouterSnapshot(1, 9, 0, 0, b"", groups, [], admitted_under), LINEAGE, [])
    assert resumption.admitted_under() == {"1-7": Version(3, 2).packed, "1-8": Version(3, 0).packed}
