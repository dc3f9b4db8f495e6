"""One suite for every checkpoint engine with deltas: what is staged is what was captured, whatever was sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from paceline.checkpoint_engine.delta_staging import stored_tensors
from paceline.core.errors import DigestMismatch, SyncError
from paceline.core.manifest import WeightManifest
from paceline.core.weight_ports import StagedWeights
from paceline.testing.publication import publish
from paceline.weights.digest import digest_tensors
from tests.contract.delta_links import BUILDING, DELTA_LINKS, DeltaLink, RayObject
from tests.unit.weights.delta.cases import DTYPES, changed_copy, copies, from_bits, random_tensor, same_bits

Named = list[tuple[str, torch.Tensor]]
Apply = Literal["mapped", "copied"]


@pytest.fixture(params=DELTA_LINKS)
def link(request: pytest.FixtureRequest) -> Iterator[DeltaLink]:
    made = DELTA_LINKS[request.param]("delta")
    yield made
    made.close()


@pytest.fixture(params=BUILDING)
def building(request: pytest.FixtureRequest) -> Iterator[DeltaLink]:
    made = DELTA_LINKS[request.param]("delta")
    yield made
    made.close()


def full(manifest: WeightManifest) -> WeightManifest:
    """As it is announced to who has to take the full version."""
    return replace(manifest, delta=None)


def holds(staged: StagedWeights, named: Named) -> bool:
    """These bits, proved by the receiver, with the ties of what was sent."""
    ties = staged.manifest.aliases
    assert staged.digest == staged.manifest.digest == digest_tensors(dict(named), ties)
    assert all(staged.tensors[name].data_ptr() == staged.tensors[stored].data_ptr() for name, stored in ties.items())
    return same_bits(dict(staged.tensors), {name: tensor.contiguous() for name, tensor in named})


def moves_there_and_back(staged: StagedWeights, base: StagedWeights) -> bool:
    """The change brings other memory from the base to the version in place, and back."""
    assert staged.change is not None
    own = copies(stored_tensors(base))
    staged.change.apply(own)
    arrived = same_bits(own, stored_tensors(staged))
    staged.change.take_back(own)
    return arrived and same_bits(own, stored_tensors(base))


def weights(seed: int = 0, elements: int = 20_000) -> Named:
    draw = torch.Generator().manual_seed(seed)
    embed = (torch.randn(elements, generator=draw) * 0.02).bfloat16()
    return [("embed", embed), ("norm", torch.ones(7)), ("step", torch.tensor(3)), ("head", embed)]


def nudged(named: Named, share: float, seed: int = 1) -> Named:
    """About `share` of the elements have other bits; ties stay."""
    draw = np.random.default_rng(seed)
    new: dict[int, torch.Tensor] = {}
    return [
        (name, new.setdefault(id(tensor), changed_copy(tensor.contiguous(), share, draw))) for name, tensor in named
    ]


def test_a_delta_is_taken_by_who_serves_its_base(building: DeltaLink) -> None:
    named = weights()
    receiver = building.receiver()
    base = receiver.stage(publish(building.sender, named, 1))
    assert (base.base_version, base.taken_bytes) == (None, base.manifest.total_bytes)
    manifest = publish(building.sender, changed := nudged(named, 0.01), 2, base_version=1)
    assert manifest.delta is not None
    staged = receiver.stage(manifest, base)
    assert holds(staged, changed)
    assert (staged.base_version, staged.taken_bytes) == (1, manifest.delta.nbytes)
    assert staged.taken_bytes < 0.05 * manifest.total_bytes
    assert staged.change is None
    assert holds(base, named)


def test_an_engine_with_memory_of_its_own_gets_the_change(link: DeltaLink) -> None:
    named = weights()
    receiver = link.receiver()
    base = receiver.stage(publish(link.sender, named, 1), None, "copied")
    assert base.change is None
    manifest = publish(link.sender, changed := nudged(named, 0.01), 2, base_version=1)
    staged = receiver.stage(manifest, base, "copied")
    assert holds(staged, changed)
    assert staged.base_version == 1
    assert moves_there_and_back(staged, base)


@pytest.mark.parametrize("served", ["nothing", "an older version", "other bytes under the base's number"])
def test_who_does_not_serve_the_base_gets_the_version_all_the_same(link: DeltaLink, served: str) -> None:
    named = weights()
    receiver, other = link.receiver(), DELTA_LINKS["in_process"]("full")
    first = publish(link.sender, named, 1)
    oldest = receiver.stage(first)
    second = publish(link.sender, nudged(named, 0.01), 2, base_version=1)
    third = publish(link.sender, changed := nudged(named, 0.02, seed=2), 3, base_version=2)
    assert second.delta is not None
    assert third.delta is not None
    foreign = other.receiver().stage(publish(other.sender, weights(seed=9), 2))
    base = {"nothing": None, "an older version": oldest, "other bytes under the base's number": foreign}[served]
    for apply in ("mapped", "copied"):
        staged = receiver.stage(third, base, apply)
        assert holds(staged, changed)
        assert staged.change is None
        assert staged.base_version in (None, 1)  # files: from version 1 over both deltas
        staged.release()


@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 0.999])
def test_a_flipped_bit_in_the_delta_is_refused_and_the_full_version_is_still_there(
    link: DeltaLink, place: float
) -> None:
    named = weights()
    receiver = link.receiver()
    base = receiver.stage(publish(link.sender, named, 1))
    manifest = publish(link.sender, changed := nudged(named, 0.01), 2, base_version=1)
    assert manifest.delta is not None
    link.flip(manifest, int(place * manifest.delta.nbytes))
    with pytest.raises(SyncError):
        receiver.stage(manifest, base, "copied")
    assert holds(base, named)
    if "filesystem" not in type(link).__name__.lower():
        assert holds(receiver.stage(full(manifest), base), changed)
    assert holds(receiver.stage(publish(link.sender, changed, 3)), changed)


def test_a_delta_of_another_version_is_refused(link: DeltaLink) -> None:
    named = weights()
    receiver = link.receiver()
    base = receiver.stage(publish(link.sender, named, 1))
    second = publish(link.sender, nudged(named, 0.01), 2, base_version=1)
    assert second.delta is not None
    lying = replace(second, digest="0" * 32)
    with pytest.raises((DigestMismatch, SyncError)):
        receiver.stage(lying, base, "copied")


def test_an_empty_delta_is_a_version(link: DeltaLink) -> None:
    named = weights()
    receiver = link.receiver()
    base = receiver.stage(publish(link.sender, named, 1))
    for version in (2, 3, 4):
        manifest = publish(link.sender, named, version, base_version=version - 1)
        assert manifest.delta is not None
        assert manifest.delta.changed == 0
        staged = receiver.stage(manifest, base, "copied")
        assert (staged.manifest.version, staged.base_version) == (version, version - 1)
        assert holds(staged, named)
        base = staged


def test_a_version_that_nobody_took_is_no_base(link: DeltaLink) -> None:
    named = weights()
    receiver = link.receiver()
    base = receiver.stage(publish(link.sender, named, 1))
    link.sender.capture(nudged(named, 0.5, seed=5), 2, 1)  # captured only
    publish(link.sender, nudged(named, 0.5, seed=6), 3, base_version=1)  # published, but it reached nobody
    manifest = publish(link.sender, changed := nudged(named, 0.01, seed=7), 4, base_version=1)
    assert manifest.delta is not None
    assert manifest.delta.base_version == 1
    staged = receiver.stage(manifest, base, "copied")
    assert holds(staged, changed)
    assert moves_there_and_back(staged, base)


def test_c09_bits_are_compared(link: DeltaLink) -> None:
    old = [0x0000, 0x8000, 0x7FC0, 0x7FC1, 0x3F80, 0x7FC0, 0x7F80, 0x3F80]
    new = [0x8000, 0x0000, 0x7FC1, 0x7FC1, 0xFFC0, 0x3F80, 0xFF80, 0x3F80]
    nan = torch.full((9,), float("nan")).bfloat16()
    before: Named = [("w", from_bits(old, torch.bfloat16)), ("nan", nan), ("filler", torch.zeros(4000))]
    after: Named = [("w", from_bits(new, torch.bfloat16)), ("nan", nan), ("filler", torch.zeros(4000))]
    receiver = link.receiver()
    base = receiver.stage(publish(link.sender, before, 1))
    manifest = publish(link.sender, after, 2, base_version=1)
    assert manifest.delta is not None
    assert manifest.delta.changed == 6
    staged = receiver.stage(manifest, base, "copied")
    assert holds(staged, after)
    assert moves_there_and_back(staged, base)
    assert (1 / staged.tensors["w"].float())[0].item() == float("-inf")


def odd_tensors(value: float) -> Named:
    return [
        ("a", torch.tensor(2.5 + value)),
        ("b", torch.zeros(0, 3)),
        ("c", (torch.arange(8.0) + value)[::2]),
        ("d", (torch.arange(6.0) * value).reshape(2, 3).t()),
        ("e", torch.full((1,), value).expand(4)),
        ("f", (torch.arange(10) + value).bfloat16()[3:8]),
        ("g", torch.zeros(4000)),
    ]


def test_c01_scalars_empty_tensors_and_views_change(link: DeltaLink) -> None:
    receiver = link.receiver()
    base = receiver.stage(publish(link.sender, odd_tensors(1), 1))
    staged = receiver.stage(publish(link.sender, odd_tensors(2), 2, base_version=1), base, "copied")
    assert staged.base_version == 1
    assert holds(staged, odd_tensors(2))
    assert moves_there_and_back(staged, base)


def test_c07_what_a_replica_missed_is_sent_again(link: DeltaLink) -> None:
    """Version 2 changes `a`, version 3 changes `b`; a replica that could not take 2 must not end as {old a, new b}."""
    a, b = torch.zeros(5000), torch.zeros(5000)
    r0, r1 = link.receiver(), link.receiver()
    first = publish(link.sender, [("a", a), ("b", b)], 1)
    served = {0: r0.stage(first), 1: r1.stage(first)}
    second = publish(link.sender, [("a", a + 1), ("b", b)], 2, base_version=1)
    served[0] = r0.stage(second, served[0])
    third = publish(link.sender, [("a", a + 1), ("b", b + 1)], 3, base_version=2)
    for receiver, base in ((r0, served[0]), (r1, served[1])):
        assert holds(receiver.stage(third, base), [("a", a + 1), ("b", b + 1)])


def test_auto_sends_a_delta_where_that_is_worth_it() -> None:
    for kind, make in BUILDING.items():
        link = make("auto")
        named = weights(elements=200_000)
        link.sender.capture(named, 1)
        assert link.sender.publish().changed_share is None
        link.sender.capture(nudged(named, 0.01), 2, 1)
        sparse = link.sender.publish()
        assert sparse.manifest.delta is not None, kind
        assert sparse.changed_share == pytest.approx(0.01, rel=0.3)
        link.sender.capture(nudged(named, 0.9), 3, 2)
        dense = link.sender.publish()
        assert dense.manifest.delta is None, kind
        assert dense.changed_share == pytest.approx(0.9, rel=0.1)
        link.close()


def test_auto_over_shared_memory_is_full() -> None:
    link = DELTA_LINKS["shared_memory"]("auto")
    publish(link.sender, weights(), 1)
    assert publish(link.sender, weights(), 2, base_version=1).delta is None
    link.close()


@st.composite
def models(draw: st.DrawFn) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    count = draw(st.integers(1, 4))
    shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
    return [(f"t{i}", draw(st.sampled_from(DTYPES)), draw(shapes)) for i in range(count)]


@pytest.mark.parametrize("kind", DELTA_LINKS)
@settings(max_examples=25, deadline=None)
@given(
    model=models(),
    densities=st.lists(st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0]), min_size=1, max_size=4),
    skips=st.lists(st.booleans(), min_size=4, max_size=4),
    apply=st.sampled_from(["mapped", "copied"]),
    seed=st.integers(0, 10_000),
)
def test_random_changes_arrive_bit_by_bit(
    kind: str,
    model: list[tuple[str, torch.dtype, tuple[int, ...]]],
    densities: list[float],
    skips: list[bool],
    apply: Apply,
    seed: int,
) -> None:
    """A replica takes some versions and skips others; each that it takes has the trainer's bits."""
    link, draw = DELTA_LINKS[kind]("delta"), np.random.default_rng(seed)
    receiver = link.receiver()
    tensors: Mapping[str, torch.Tensor] = {name: random_tensor(dtype, shape, draw) for name, dtype, shape in model}
    served = receiver.stage(publish(link.sender, tensors.items(), 0))
    for version, (density, skip) in enumerate(zip(densities, skips, strict=False), start=1):
        tensors = {name: changed_copy(tensor, density, draw) for name, tensor in tensors.items()}
        manifest = publish(link.sender, tensors.items(), version, base_version=version - 1)
        if skip:
            continue
        staged = receiver.stage(manifest, served, apply)
        assert holds(staged, list(tensors.items()))
        if staged.change is not None:
            assert moves_there_and_back(staged, served)
        served.release()
        served = staged
    receiver.close()
    link.close()


def test_a_store_without_room_for_the_delta_has_the_full_version() -> None:
    link = RayObject("delta")
    named = weights()
    receiver = link.receiver()
    base = receiver.stage(publish(link.sender, named, 1))
    link.cluster.capacity_bytes = 2 * base.manifest.total_bytes + 100
    manifest = publish(link.sender, changed := nudged(named, 0.01), 2, base_version=1)
    assert manifest.delta is None
    assert holds(receiver.stage(manifest, base), changed)
    link.close()


def test_over_shared_memory_a_delta_that_does_not_fit_behind_its_version_is_not_sent() -> None:
    link = DELTA_LINKS["shared_memory"]("delta")
    noise = torch.Generator().manual_seed(0)
    before, after = torch.randint(0, 1 << 30, (2, 1 << 18), generator=noise)
    receiver = link.receiver()
    base = receiver.stage(publish(link.sender, [("w", before)], 1))
    manifest = publish(link.sender, [("w", after)], 2, base_version=1)
    assert manifest.delta is None
    assert holds(receiver.stage(manifest, base, "copied"), [("w", after)])
    link.close()


@pytest.mark.parametrize("kind", BUILDING)
def test_what_is_built_costs_two_versions_of_memory_however_many_syncs(kind: str) -> None:
    """The version that is served and the one that is staged: their buffers are used in turns."""
    link = DELTA_LINKS[kind]("delta")
    named = weights()
    receiver = link.receiver()
    served = receiver.stage(publish(link.sender, named, 0))
    places: set[int] = set()
    for version in range(1, 12):
        named = nudged(named, 0.01, seed=version)
        staged = receiver.stage(publish(link.sender, named, version, base_version=version - 1), served)
        assert staged.base_version == version - 1
        served.release()
        served = staged
        places.add(staged.tensors["embed"].data_ptr())
    assert len(places) <= 3  # the first may still lie where the full version was
    link.close()
