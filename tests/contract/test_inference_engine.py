"""What every inference engine promises (`core.ports.InferenceEngine`).

A new engine joins by a function in `ENGINES` that makes an `EngineUnderTest`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from paceline.core.errors import CoverageError
from paceline.core.ports import InferenceEngine
from paceline.core.sample import Completion, GenerationRequest, SamplingParams
from tests.unit.engine.tiny_engines import make_engine, make_model

PLACES = 4


@dataclass(frozen=True)
class EngineUnderTest:
    """An engine with `PLACES` places and no weights, and two sets of weights that it can serve."""

    engine: InferenceEngine
    old: Mapping[str, torch.Tensor]
    new: Mapping[str, torch.Tensor]


def embedded(directory: Path) -> EngineUnderTest:
    old, new = make_model("qwen3", directory, seed=0), make_model("qwen3", directory, seed=1)
    return EngineUnderTest(make_engine(directory, max_num_seqs=PLACES), old.state_dict(), new.state_dict())


ENGINES: dict[str, Callable[[Path], EngineUnderTest]] = {"embedded": embedded}


@pytest.fixture(params=sorted(ENGINES))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> EngineUnderTest:
    return ENGINES[request.param](tmp_path)


def ask(name: str, max_tokens: int = 5, carried: int = 0) -> GenerationRequest:
    params = SamplingParams(1.0, 1.0, -1, max_tokens, ())
    return GenerationRequest(name, [3, 4, 5], params, [7] * carried, [-1.0] * carried, [1] * carried)


def drain(engine: InferenceEngine) -> list[Completion]:
    made: list[Completion] = []
    for _ in range(200):
        if not engine.running and not engine.waiting:
            return made + engine.step()
        made += engine.step()
    raise AssertionError("the engine does not come to an end")


def test_expected_tensors_are_those_it_can_be_bound_to(case: EngineUnderTest) -> None:
    assert case.engine.expected_tensors() == {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in case.old.items()
    }
    assert case.engine.version is None


def test_what_is_served_is_the_bound_memory(case: EngineUnderTest) -> None:
    for tensors, version in ((case.old, 1), (case.new, 2)):
        case.engine.bind(tensors, version)
        served = case.engine.served_tensors()
        assert {n: t.data_ptr() for n, t in served.items()} == {n: t.data_ptr() for n, t in tensors.items()}
        assert case.engine.version == version


def test_every_request_ends_once_with_as_many_logprobs_and_versions(case: EngineUnderTest) -> None:
    engine = case.engine
    engine.bind(case.old, 1)
    engine.add([ask(str(i), 1 + i % 5) for i in range(3 * PLACES)])
    assert engine.waiting == 3 * PLACES
    most_running, made = 0, []
    while engine.running or engine.waiting:
        made += engine.step()
        most_running = max(most_running, engine.running)
    assert 0 < most_running <= PLACES
    assert sorted(c.request_id for c in made) == sorted(str(i) for i in range(3 * PLACES))
    for done in made:
        assert len(done.token_ids) == len(done.logprobs) == len(done.versions) == 1 + int(done.request_id) % 5
        assert done.finish_reason == "length"
        assert all(logprob <= 0 for logprob in done.logprobs)
    assert engine.tokens_generated == sum(len(done.token_ids) for done in made)


def test_a_finished_place_is_taken_at_once(case: EngineUnderTest) -> None:
    engine = case.engine
    engine.bind(case.old, 1)
    engine.add([ask("short", 1), *[ask(f"long-{i}", 6) for i in range(PLACES - 1)], ask("next", 1)])
    made = [c.request_id for _ in range(3) for c in engine.step()]
    assert made == ["short", "next"]


def test_each_token_carries_the_version_bound_when_it_was_made(case: EngineUnderTest) -> None:
    engine = case.engine
    engine.bind(case.old, 3)
    engine.add([ask(str(i)) for i in range(PLACES + 1)])
    engine.step()
    engine.step()
    engine.bind(case.new, 8)
    made = {done.request_id: done for done in drain(engine)}
    assert all(made[str(i)].versions == [3, 3, 8, 8, 8] for i in range(PLACES))
    assert made[str(PLACES)].versions == [8] * 5


def test_a_refused_binding_changes_nothing(case: EngineUnderTest) -> None:
    engine = case.engine
    engine.bind(case.old, 3)
    name = next(iter(case.old))
    for wrong in (
        {key: value for key, value in case.new.items() if key != name},
        {**case.new, "stranger": torch.zeros(1)},
        {**case.new, name: torch.zeros(3, 3)},
        {**case.new, name: case.new[name].to(torch.float16)},
    ):
        with pytest.raises(CoverageError):
            engine.bind(wrong, 4)
    assert engine.version == 3
    assert {n: t.data_ptr() for n, t in engine.served_tensors().items()} == {
        n: t.data_ptr() for n, t in case.old.items()
    }


def test_aborted_requests_return_what_they_have_and_others_go_on(case: EngineUnderTest) -> None:
    engine = case.engine
    engine.bind(case.old, 1)
    engine.add([ask(str(i)) for i in range(PLACES + 2)])
    engine.step()
    engine.step()
    taken = {done.request_id: done for done in engine.abort(["0", str(PLACES), "unknown"])}
    assert {name: (len(d.token_ids), d.finish_reason) for name, d in taken.items()} == {
        "0": (2, "abort"),
        str(PLACES): (0, "abort"),
    }
    rest = drain(engine)
    assert sorted(done.request_id for done in rest) == sorted({str(i) for i in range(PLACES + 2)} - set(taken))
    assert all(len(done.token_ids) == 5 and done.finish_reason == "length" for done in rest)


def test_a_continued_request_keeps_what_it_brought(case: EngineUnderTest) -> None:
    engine = case.engine
    engine.bind(case.old, 2)
    engine.add([ask("half", 5, carried=2), ask("whole", 3, carried=3)])
    made = {done.request_id: done for done in drain(engine)}
    half, whole = made["half"], made["whole"]
    assert (half.token_ids[:2], half.logprobs[:2], half.versions) == ([7, 7], [-1.0, -1.0], [1, 1, 2, 2, 2])
    assert (whole.token_ids, whole.versions, whole.finish_reason) == ([7] * 3, [1] * 3, "length")
    assert engine.tokens_generated == 3


def test_an_idle_engine_steps_to_nothing(case: EngineUnderTest) -> None:
    case.engine.bind(case.old, 1)
    assert case.engine.step() == []
    assert (case.engine.running, case.engine.waiting, case.engine.tokens_generated) == (0, 0, 0)


def test_the_tokens_of_each_step_add_up_to_the_responses(case: EngineUnderTest) -> None:
    engine = case.engine
    engine.bind(case.old, 1)
    requests = [ask(f"r{n}", max_tokens=1 + n, carried=n % 3) for n in range(2 * PLACES)]
    engine.add(requests)
    grown = {r.request_id: list(zip(r.response_ids, r.logprobs, r.versions, strict=True)) for r in requests}
    done: list[Completion] = []
    for number in range(200):
        if number == 3:
            engine.bind(case.new, 2)
        done += engine.step()
        made = engine.last_step
        if made is None:
            break
        for name, token, logprob in zip(made.request_ids, made.token_ids, made.logprobs, strict=True):
            grown[name].append((token, logprob, made.version))
    assert len(done) == len(requests)
    for one in done:
        assert grown[one.request_id] == list(zip(one.token_ids, one.logprobs, one.versions, strict=True))
