"""A manifest that somebody else has written: it is refused with one error, or what is staged is what was published.

Manifests come over sockets and from files, so every field may hold anything its type allows. Nothing that is claimed
may reserve memory, leave a lease, or end in an error that is not of a sync.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from paceline.core.errors import SyncError
from paceline.core.manifest import DeltaRecord, TensorMeta, WeightManifest
from paceline.testing.publication import publish
from paceline.weights.digest import dense_bytes
from tests.contract.checkpoint_engine_links import LINKS, Link

NAMED = [("a", torch.arange(40.0)), ("b", torch.ones(3, 5, dtype=torch.bfloat16)), ("c", torch.zeros(0, 2))]
NUMBERS = st.one_of(
    st.integers(-4, 400), st.integers(0, 70).map(lambda exponent: 1 << exponent), st.integers(-(1 << 66), 1 << 66)
)
TEXTS = st.one_of(
    st.sampled_from(
        ["", "a", "b", "float32", "int8", "uint4", "Tensor", "load", "0" * 32, "f" * 32, "object-", "../1"]
    ),
    st.text(max_size=40),
)
SHAPES = st.lists(st.one_of(st.integers(-2, 9), NUMBERS), max_size=40).map(tuple)
TENSOR_FIELDS = {"name": TEXTS, "dtype": TEXTS, "shape": SHAPES, "offset": NUMBERS, "nbytes": NUMBERS, "digest": TEXTS}
TENSORS = st.builds(TensorMeta, TEXTS, TEXTS, SHAPES, NUMBERS, NUMBERS, TEXTS)
DELTAS = st.builds(
    DeltaRecord, NUMBERS, TEXTS, NUMBERS, NUMBERS, NUMBERS, st.sampled_from(["fast", "small"]), TEXTS, NUMBERS
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "version": NUMBERS,
    "tensors": st.lists(TENSORS, max_size=3).map(tuple),
    "aliases": st.dictionaries(TEXTS, TEXTS, max_size=3),
    "total_bytes": NUMBERS,
    "digest": TEXTS,
    "arena_id": TEXTS,
    "delta": st.none() | DELTAS,
}


@st.composite
def forgeries(draw: st.DrawFn, manifest: WeightManifest) -> WeightManifest:
    """One to three fields say something else, of the manifest or of one of its tensors."""
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()) or not manifest.tensors:
            field = draw(st.sampled_from(sorted(FIELDS)))
            manifest = replace(manifest, **{field: draw(FIELDS[field])})
            continue
        index, field = draw(st.integers(0, len(manifest.tensors) - 1)), draw(st.sampled_from(sorted(TENSOR_FIELDS)))
        forged = replace(manifest.tensors[index], **{field: draw(TENSOR_FIELDS[field])})
        manifest = replace(manifest, tensors=(*manifest.tensors[:index], forged, *manifest.tensors[index + 1 :]))
    return manifest


@pytest.fixture(params=LINKS)
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    made = LINKS[request.param]()
    yield made
    made.close()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_it_is_refused_or_it_is_the_version(link: Link, data: st.DataObject) -> None:
    if not hasattr(link, "published"):
        link.published = (sender := link.sender()), publish(sender, NAMED, 1)  # type: ignore[attr-defined]
    sender, manifest = link.published  # type: ignore[attr-defined]
    forged = data.draw(forgeries(manifest))
    receiver = link.receiver()
    base = receiver.stage(manifest) if data.draw(st.booleans()) else None
    refusal = ""
    try:
        staged = receiver.stage(forged, base, data.draw(st.sampled_from(["mapped", "copied"])))
    except SyncError as error:
        refusal = error.message
    else:
        assert staged.digest == manifest.digest
        for name, tensor in NAMED:
            assert dense_bytes(staged.tensors[name]).tobytes() == dense_bytes(tensor).tobytes()
        staged.release()
    assert "\n" not in refusal
    receiver.close()
    del base
    assert list(sender.blocking_holders()) == []
