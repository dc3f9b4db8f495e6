"""Order, ids and cursor of the training prompts."""

from __future__ import annotations

import msgspec
import pytest

from paceline.core.errors import ConfigError, PromptError
from paceline.core.events import PromptRefused
from paceline.core.sample import Prompt
from paceline.rollout.prompt_dataset import DatasetCursor, PromptDataset
from paceline.rollout.usable_prompts import UsablePrompts
from paceline.testing.recording import RecordingEvents


def prompts(count: int, start: int = 0) -> list[Prompt]:
    return [Prompt(f"p{index}", f"{index}=", (index, 1), str(index), "test") for index in range(start, start + count)]


def dataset(count: int = 10, seed: int = 0) -> PromptDataset:
    return PromptDataset(train=prompts(count), validation=prompts(3, 100), seed=seed)


def take(source: PromptDataset, count: int) -> list[Prompt]:
    return [source.next_prompt() for _ in range(count)]


def test_every_prompt_comes_once_an_epoch_and_epochs_go_on() -> None:
    source = dataset()
    for epoch in range(3):
        given = take(source, 10)
        assert sorted(prompt.prompt_id for prompt in given) == [f"{epoch}:p{index}" for index in range(10)]
        for prompt in given:
            index = int(prompt.ground_truth)
            assert (prompt.text, prompt.token_ids, prompt.data_source) == (f"{index}=", (index, 1), "test")


def test_the_order_follows_from_seed_and_epoch() -> None:
    first, same, other = (take(dataset(seed=seed), 20) for seed in (1, 1, 2))
    assert first == same
    assert first != other
    assert [p.text for p in first[:10]] != [p.text for p in first[10:]]
    assert [p.text for p in first[:10]] != [p.text for p in prompts(10)]


@pytest.mark.parametrize("given", [0, 7, 10, 23])
def test_a_cursor_restores_the_place(given: int) -> None:
    source = dataset()
    take(source, given)
    cursor = msgspec.msgpack.decode(msgspec.msgpack.encode(source.state()), type=DatasetCursor)
    resumed = dataset()
    take(resumed, 4)
    resumed.restore(cursor)
    assert take(resumed, 15) == take(source, 15)


@pytest.mark.parametrize(
    "cursor",
    [
        DatasetCursor(epoch=0, position=1, seed=1, size=10),
        DatasetCursor(epoch=0, position=1, seed=0, size=11),
        DatasetCursor(epoch=0, position=11, seed=0, size=10),
        DatasetCursor(epoch=-1, position=0, seed=0, size=10),
    ],
)
def test_a_cursor_of_another_data_set_is_refused(cursor: DatasetCursor) -> None:
    source = dataset()
    with pytest.raises(ConfigError, match="data: "):
        source.restore(cursor)
    assert source.state() == DatasetCursor(epoch=0, position=0, seed=0, size=10)


def test_validation_prompts_are_as_given() -> None:
    assert list(dataset().validation_prompts()) == prompts(3, 100)


def test_no_training_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="no training prompts"):
        PromptDataset(train=[], validation=[], seed=0)


class Rows:
    """Ten rows, of which some are bad; counts what is read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, place: int) -> Prompt:
        self.read.append(place)
        if place % 2:
            raise PromptError(f"rows.jsonl:{place}: has no prompt", f"rows.jsonl:{place}")
        return prompts(1, place)[0]


def test_rows_are_read_when_their_turn_comes() -> None:
    rows = Rows()
    source = PromptDataset(train=rows, validation=[], seed=0)
    assert rows.read == []
    for _ in range(10):
        try:
            source.next_prompt()
        except PromptError:
            continue
    assert sorted(rows.read) == list(range(10))
    assert source.state() == DatasetCursor(epoch=0, position=10, seed=0, size=10)


def test_a_bad_row_is_counted_by_name_and_the_next_one_comes() -> None:
    events = RecordingEvents()
    usable = UsablePrompts(PromptDataset(train=Rows(), validation=[], seed=0), longest=9, events=events)
    drawn = [prompt.prompt_id for _ in range(10) if (prompt := usable.next_prompt()) is not None]
    assert sorted(drawn) == sorted(f"{epoch}:p{place}" for epoch in (0, 1) for place in range(0, 10, 2))
    refused = events.of(PromptRefused)
    # How many of the second epoch's come before its last good one, the order decides.
    assert {event.prompt_id for event in refused[:5]} == {f"rows.jsonl:{place}" for place in range(1, 10, 2)}
    assert refused[0].reason == f"{refused[0].prompt_id}: has no prompt"


def test_a_data_set_without_a_usable_row_is_an_error_that_names_one() -> None:
    class Bad(Rows):
        def __getitem__(self, place: int) -> Prompt:
            raise PromptError("rows.jsonl:7: is no JSON", "rows.jsonl:7")

    usable = UsablePrompts(PromptDataset(train=Bad(), validation=[], seed=0), longest=9, events=RecordingEvents())
    with pytest.raises(ConfigError, match=r"10000 prompts in a row .* the last one: rows\.jsonl:7: is no JSON"):
        usable.next_prompt()
