"""What every inference engine promises (`core.ports.InferenceEngine`), as functions that raise AssertionError.

    for promise in ENGINE_CONTRACT:
        promise(EngineUnderTest(my_engine(places=PLACES), old_weights, new_weights))

Each takes an engine of its own, fresh and without weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.core.errors import CoverageError
from paceline.core.ports import InferenceEngine
from paceline.core.sample import Completion, GenerationRequest, SamplingParams

PLACES = 4


@dataclass(frozen=True)
class EngineUnderTest:
    """An engine with `PLACES` places and no weights, and two sets of weights that it can serve. Its vocabulary has ids
    up to 7 at least, and no token ends a response.
    """

    engine: InferenceEngine
    old: Mapping[str, torch.Tensor]
    new: Mapping[str, torch.Tensor]


def _ask(name: str, max_tokens: int = 5, carried: int = 0) -> GenerationRequest:
    params = SamplingParams(1.0, 1.0, -1, max_tokens, ())
    return GenerationRequest(name, [3, 4, 5], params, [7] * carried, [-1.0] * carried, [1] * carried)


def _drain(engine: InferenceEngine) -> list[Completion]:
    made: list[Completion] = []
    for _ in range(200):
        if not engine.running and not engine.waiting:
            return made + engine.step()
        made += engine.step()
    raise AssertionError("the engine does not come to an end")


def expected_tensors_are_those_it_can_be_bound_to(case: EngineUnderTest) -> None:
    """Names, dtypes and shapes are known before the first weights."""
    assert case.engine.expected_tensors() == {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in case.old.items()
    }
    assert case.engine.version is None


def what_is_served_is_the_bound_memory(case: EngineUnderTest) -> None:
    """A mapped engine serves the very memory it was given, one that copies the same bytes."""
    for tensors, version in ((case.old, 1), (case.new, 2)):
        case.engine.bind(tensors, version)
        _serves(case.engine, tensors)
        assert case.engine.version == version


def every_request_ends_once_with_as_many_logprobs_and_versions(case: EngineUnderTest) -> None:
    """More requests than places: each ends once, no more than `PLACES` run."""
    engine = case.engine
    engine.bind(case.old, 1)
    engine.add([_ask(str(i), 1 + i % 5) for i in range(3 * PLACES)])
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


def a_finished_place_is_taken_at_once(case: EngineUnderTest) -> None:
    """Continuous batching: the next request does not wait for the others."""
    engine = case.engine
    engine.bind(case.old, 1)
    engine.add([_ask("short", 1), *[_ask(f"long-{i}", 6) for i in range(PLACES - 1)], _ask("next", 1)])
    made = [c.request_id for _ in range(3) for c in engine.step()]
    assert made == ["short", "next"]


def each_token_carries_the_version_bound_when_it_was_made(case: EngineUnderTest) -> None:
    """Sequences in flight go on under the new weights and say so, token by token."""
    engine = case.engine
    engine.bind(case.old, 3)
    engine.add([_ask(str(i)) for i in range(PLACES + 1)])
    engine.step()
    engine.step()
    engine.bind(case.new, 8)
    made = {done.request_id: done for done in _drain(engine)}
    assert all(made[str(i)].versions == [3, 3, 8, 8, 8] for i in range(PLACES))
    assert made[str(PLACES)].versions == [8] * 5


def a_refused_binding_changes_nothing(case: EngineUnderTest) -> None:
    """Missing, unknown, wrongly shaped or typed tensors are a `CoverageError`."""
    engine = case.engine
    engine.bind(case.old, 3)
    name = next(iter(case.old))
    for wrong in (
        {key: value for key, value in case.new.items() if key != name},
        {**case.new, "stranger": torch.zeros(1)},
        {**case.new, name: torch.zeros(3, 3)},
        {**case.new, name: case.new[name].to(torch.float16)},
    ):
        assert _refuses(engine, wrong)
    assert engine.version == 3
    _serves(engine, case.old)


def aborted_requests_return_what_they_have_and_others_go_on(case: EngineUnderTest) -> None:
    """Running and waiting ones alike; unknown ids are ignored."""
    engine = case.engine
    engine.bind(case.old, 1)
    engine.add([_ask(str(i)) for i in range(PLACES + 2)])
    engine.step()
    engine.step()
    taken = {done.request_id: done for done in engine.abort(["0", str(PLACES), "unknown"])}
    assert {name: (len(d.token_ids), d.finish_reason) for name, d in taken.items()} == {
        "0": (2, "abort"),
        str(PLACES): (0, "abort"),
    }
    rest = _drain(engine)
    assert sorted(done.request_id for done in rest) == sorted({str(i) for i in range(PLACES + 2)} - set(taken))
    assert all(len(done.token_ids) == 5 and done.finish_reason == "length" for done in rest)


def a_continued_request_keeps_what_it_brought(case: EngineUnderTest) -> None:
    """Tokens that a request carries are neither made again nor counted."""
    engine = case.engine
    engine.bind(case.old, 2)
    engine.add([_ask("half", 5, carried=2), _ask("whole", 3, carried=3)])
    made = {done.request_id: done for done in _drain(engine)}
    half, whole = made["half"], made["whole"]
    assert (half.token_ids[:2], half.logprobs[:2], half.versions) == ([7, 7], [-1.0, -1.0], [1, 1, 2, 2, 2])
    assert (whole.token_ids, whole.versions, whole.finish_reason) == ([7] * 3, [1] * 3, "length")
    assert engine.tokens_generated == 3


def an_idle_engine_steps_to_nothing(case: EngineUnderTest) -> None:
    """A step without requests is harmless."""
    case.engine.bind(case.old, 1)
    assert case.engine.step() == []
    assert (case.engine.running, case.engine.waiting, case.engine.tokens_generated) == (0, 0, 0)


def the_tokens_of_each_step_add_up_to_the_responses(case: EngineUnderTest) -> None:
    """`last_step` of all steps together is what the responses hold."""
    engine = case.engine
    engine.bind(case.old, 1)
    requests = [_ask(f"r{n}", max_tokens=1 + n, carried=n % 3) for n in range(2 * PLACES)]
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


def _refuses(engine: InferenceEngine, tensors: Mapping[str, torch.Tensor]) -> bool:
    try:
        engine.bind(tensors, 4)
    except CoverageError:
        return True
    return False


def _serves(engine: InferenceEngine, tensors: Mapping[str, torch.Tensor]) -> None:
    served = engine.served_tensors()
    assert served.keys() == tensors.keys()
    if engine.apply == "mapped":
        assert {n: t.data_ptr() for n, t in served.items()} == {n: t.data_ptr() for n, t in tensors.items()}
    assert all(torch.equal(served[name], tensor) for name, tensor in tensors.items())


ENGINE_CONTRACT: Sequence[Callable[[EngineUnderTest], None]] = (
    expected_tensors_are_those_it_can_be_bound_to,
    what_is_served_is_the_bound_memory,
    every_request_ends_once_with_as_many_logprobs_and_versions,
    a_finished_place_is_taken_at_once,
    each_token_carries_the_version_bound_when_it_was_made,
    a_refused_binding_changes_nothing,
    aborted_requests_return_what_they_have_and_others_go_on,
    a_continued_request_keeps_what_it_brought,
    an_idle_engine_steps_to_nothing,
    the_tokens_of_each_step_add_up_to_the_responses,
)
