"""One suite for every checkpoint engine, bytes: what is staged is what was captured, whole, or it is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import CoverageError, DigestMismatch, NonFiniteWeights, SyncError
from paceline.core.weight_ports import StagedWeights
from paceline.testing.publication import publish
from paceline.weights.digest import dense_bytes, digest_tensors
from paceline.weights.named_tensors import split_aliases
from tests.contract.checkpoint_engine_links import LINKS, Link, Named, link_with_buckets


@pytest.fixture(params=LINKS)
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    made = LINKS[request.param]()
    yield made
    made.close()


def same_bytes(staged: StagedWeights, named: Named) -> bool:
    """Same names, shapes, types and bits; the digest is the one taken apart from any engine."""
    stored, aliases = split_aliases(named)
    assert staged.digest == staged.manifest.digest == digest_tensors(stored, aliases)
    assert set(staged.tensors) == {name for name, _ in named}
    return all(
        staged.tensors[name].shape == tensor.shape
        and staged.tensors[name].dtype == tensor.dtype
        and dense_bytes(staged.tensors[name]).tobytes() == dense_bytes(tensor).tobytes()
        for name, tensor in named
    )


def roundtrip(link: Link, named: Named, dtype: str | None = None, keep: tuple[str, ...] = ()) -> StagedWeights:
    return link.receiver().stage(publish(link.sender(dtype=dtype, nonfinite="off", keep=keep), named, 1))


# ---- C01: scalars, empty tensors, strided views ---------------------------------------------------------------------


def odd_tensors() -> Named:
    return [
        ("a", torch.tensor(2.5)),
        ("b", torch.zeros(0, 3)),
        ("c", torch.arange(8.0)[::2]),
        ("d", torch.arange(6.0).reshape(2, 3).t()),
        ("e", torch.ones(1).expand(4)),
        ("f", torch.arange(10).bfloat16()[3:8]),
    ]


@pytest.mark.parametrize("bucket", [64, 1 << 20])
@pytest.mark.parametrize("kind", LINKS)
def test_c01_scalars_empty_tensors_and_views_arrive(kind: str, bucket: int) -> None:
    with closing(link_with_buckets(kind, bucket)) as link:
        _arrive_as_dense_copies(link)


def _arrive_as_dense_copies(link: Link) -> None:
    named = odd_tensors()
    strides = [tensor.stride() for _, tensor in named]
    staged = roundtrip(link, named)
    assert same_bytes(staged, named)
    assert [tensor.stride() for _, tensor in named] == strides
    assert sum(meta.nbytes for meta in staged.manifest.tensors) == 70
    assert all(tensor.is_contiguous() for tensor in staged.tensors.values())


def test_c01_only_an_empty_tensor_is_a_version(link: Link) -> None:
    sender, receiver = link.sender(), link.receiver()
    for version in (1, 2, 3):
        staged = receiver.stage(publish(sender, [("b", torch.zeros(0, 3))], version))
        assert (staged.manifest.version, staged.tensors["b"].shape) == (version, (0, 3))
        staged.release()


def test_c01_no_tensors_are_refused(link: Link) -> None:
    with pytest.raises(CoverageError, match="no parameters"):
        publish(link.sender(), [], 1)


# ---- C02: every type ------------------------------------------------------------------------------------------------

RAW = torch.tensor([1, 0, 1, 0, 1, 1, 0, 0], dtype=torch.uint8)
TYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "complex64",
]


def test_c02_every_type_arrives_as_it_is(link: Link) -> None:
    named: Named = [(name, RAW.clone().view(getattr(torch, name))) for name in TYPES]
    named.append(("large", torch.tensor(2**53 + 1)))
    staged = roundtrip(link, named)
    assert same_bytes(staged, named)
    assert staged.tensors["large"].item() == 2**53 + 1


def test_c02_only_undeclared_floats_are_cast(link: Link) -> None:
    value = torch.tensor(1 + 2**-9)
    named: Named = [(name, RAW.clone().view(getattr(torch, name))) for name in TYPES]
    named += [("router.bias", value), ("other.bias", value.clone()), ("large", torch.tensor(2**53 + 1))]
    staged = roundtrip(link, named, dtype="bfloat16", keep=("router.bias",)).tensors
    assert (staged["router.bias"].dtype, staged["router.bias"].item()) == (torch.float32, 1.001953125)
    assert (staged["other.bias"].dtype, staged["other.bias"].item()) == (torch.bfloat16, 1.0)
    assert staged["large"].item() == 2**53 + 1
    cast = {name for name, tensor in named if staged[name].dtype != tensor.dtype}
    assert cast == {"float16", "float32", "float64", "other.bias"}


def test_c02_what_cannot_be_carried_is_refused_by_name(link: Link) -> None:
    sender = link.sender()
    with pytest.raises(SyncError, match=r"'q'.*sparse"):
        publish(sender, [("w", torch.ones(2)), ("q", torch.eye(2).to_sparse())], 1)
    publish(sender, [("w", torch.ones(2))], 1)


# ---- C05: tied weights ----------------------------------------------------------------------------------------------


def test_c05_ties_arrive_as_ties_in_every_version(link: Link) -> None:
    sender, receiver = link.sender(arenas=3), link.receiver()
    weight = torch.arange(12.0).view(4, 3)
    for version in (1, 2):
        weight += 1
        named: Named = [("embed.weight", weight), ("norm", torch.ones(2)), ("head.weight", weight)]
        staged = receiver.stage(publish(sender, named, version))
        assert same_bytes(staged, named)
        assert staged.manifest.aliases == {"head.weight": "embed.weight"}
        assert staged.tensors["head.weight"].data_ptr() == staged.tensors["embed.weight"].data_ptr()


def test_c05_weights_that_drifted_apart_are_refused_by_both_names(link: Link) -> None:
    sender, receiver = link.sender(), link.receiver()
    weight = torch.arange(12.0).view(4, 3)
    first = publish(sender, [("embed.weight", weight), ("head.weight", weight)], 1)
    with pytest.raises(CoverageError, match=r"'head.weight' was tied to 'embed.weight'"):
        publish(sender, [("embed.weight", weight), ("head.weight", weight + 1)], 2)
    assert torch.equal(receiver.stage(first).tensors["head.weight"], weight)


def test_c05_equal_values_are_no_tie(link: Link) -> None:
    staged = roundtrip(link, [("embed", torch.ones(2)), ("head", torch.ones(2))])
    assert staged.manifest.aliases == {}
    assert staged.tensors["embed"].data_ptr() != staged.tensors["head"].data_ptr()


# ---- C25: non-finite weights ----------------------------------------------------------------------------------------

BAD: dict[str, tuple[torch.Tensor, str | None]] = {
    "nan": (torch.tensor([1.0, 2.0, 3.0, math.nan]), None),
    "infinite after the cast": (torch.tensor([3.4e38, 1.0, 1.0, 1.0]), "bfloat16"),
    "fp8 nan": (torch.tensor([0, 0x7F, 1, 2], dtype=torch.uint8).view(torch.float8_e4m3fn), None),
    "fp8 infinity": (torch.tensor([0, 0x7C, 1, 2], dtype=torch.uint8).view(torch.float8_e5m2), None),
    "fp8 of exponents": (torch.tensor([1, 2, 3, 0xFF], dtype=torch.uint8).view(torch.float8_e8m0fnu), None),
    "imaginary": (torch.tensor([1.0, complex(0, math.inf), 1.0, 1.0]), None),
    "half too large": (torch.tensor([7e4, 1.0, 1.0, 1.0]), "float16"),
    "double too large": (torch.tensor([1.0, -1e300, 1.0, 1.0], dtype=torch.float64), "float32"),
    "in a view": (torch.tensor([1.0, math.nan, 1.0, math.nan, 1.0, 1.0, -math.inf, 1.0])[::2], None),
}


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.to(torch.complex128), other.to(torch.complex128))


@pytest.mark.parametrize("case", BAD)
def test_c25_nothing_is_published_and_the_version_before_stays(link: Link, case: str) -> None:
    bad, dtype = BAD[case]
    rest: Named = [("i", torch.full((4,), -1, dtype=torch.int8)), ("flag", torch.ones(4, dtype=torch.bool))]
    sender, receiver = link.sender(dtype=dtype), link.receiver()
    good = torch.ones(4).to(bad.dtype)
    first = publish(sender, [("w", good), *rest], 1)
    with pytest.raises(NonFiniteWeights, match="'w': 1;"):
        publish(sender, [("w", bad), *rest], 2)
    assert sender.blocking_holders() == []
    staged = receiver.stage(first)
    assert same_values(staged.tensors["w"], good)
    assert receiver.stage(publish(sender, [("w", good), *rest], 2)).manifest.version == 2


def test_c25_a_buffer_declared_any_value_may_hold_nan_and_nothing_else_may(link: Link) -> None:
    named: Named = [("w", torch.ones(4)), ("stats.scratch", torch.tensor([math.nan, math.inf]))]
    sender, receiver = link.sender(any_value=("stats.*",)), link.receiver()
    staged = receiver.stage(publish(sender, named, 1))
    assert same_bytes(staged, named)
    staged.release()
    with pytest.raises(NonFiniteWeights, match="'w': 1;"):
        publish(sender, [("w", torch.tensor([1.0, math.nan, 1.0, 1.0])), named[1]], 2)


def test_c25_off_is_exact(link: Link) -> None:
    named: Named = [(name, tensor) for name, (tensor, _) in BAD.items()]
    assert same_bytes(roundtrip(link, named), named)


# ---- what is staged is what was captured ----------------------------------------------------------------------------

RELATIVES = ["float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2", "complex128", "uint4", "int2"]
ANY_TYPE = st.sampled_from([getattr(torch, name) for name in [*TYPES, *RELATIVES]])
SHAPE = st.lists(st.integers(0, 7), max_size=4)
# safetensors keeps one name for itself; that it is refused is tested where files are.
NAME = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter("__metadata__".__ne__)


@st.composite
def state_dicts(draw: st.DrawFn) -> Named:
    named: Named = []
    for name in draw(st.lists(NAME, min_size=1, max_size=6, unique=True)):
        dtype, shape = draw(ANY_TYPE), draw(SHAPE)
        seed = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
        raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), generator=seed).to(torch.uint8)
        tensor = raw.remainder(2).view(dtype) if dtype == torch.bool else raw.view(dtype)
        tensor = tensor.view(shape).permute(draw(st.permutations(range(len(shape)))))
        named.append((name, tensor))
    named += [(f"{name}'", tensor) for name, tensor in named if draw(st.booleans())]
    return list(dict(named).items())


BUCKET = st.sampled_from([1, 48, 4096, 1 << 20])


def change(named: Named, data: st.DataObject) -> None:
    """Other bits at a few places of a few tensors, or nowhere."""
    for _, tensor in data.draw(st.lists(st.sampled_from(named), max_size=3)):
        raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        places = data.draw(st.lists(st.integers(0, max(0, len(raw) - 1)), max_size=3))
        for place in places[: len(raw)]:
            raw[place] = data.draw(st.integers(0, 1 if tensor.dtype == torch.bool else 255))


@pytest.mark.parametrize("kind", LINKS)
@settings(max_examples=40, deadline=None)
@given(named=state_dicts(), bucket=BUCKET, versions=st.integers(2, 4), data=st.data())
def test_random_state_dicts_arrive_bit_by_bit_after_random_changes(
    kind: str, named: Named, bucket: int, versions: int, data: st.DataObject
) -> None:
    with closing(link_with_buckets(kind, bucket)) as link, closing(link.receiver()) as receiver:
        sender = link.sender(nonfinite="off")
        for version in range(1, 1 + versions):
            staged = receiver.stage(publish(sender, named, version))
            assert same_bytes(staged, named)
            staged.release()
            change(named, data)


@settings(max_examples=60, deadline=None)
@given(named=state_dicts(), bucket=BUCKET, bit=st.integers(0, 7), data=st.data())
@pytest.mark.parametrize("kind", LINKS)
def test_one_flipped_bit_anywhere_is_caught(
    kind: str, named: Named, bucket: int, bit: int, data: st.DataObject
) -> None:
    named = [("w", torch.ones(700, 500)), *((f"x.{name}", tensor) for name, tensor in named)]
    with closing(link_with_buckets(kind, bucket)) as link:
        sender = link.sender(nonfinite="off")
        manifest = publish(sender, named, 1)
        meta = data.draw(st.sampled_from([meta for meta in manifest.tensors if meta.nbytes]))
        link.flip(manifest, meta.offset + data.draw(st.integers(0, meta.nbytes - 1)), bit)
        with pytest.raises(DigestMismatch, match="replica-0 staged"):
            link.receiver().stage(manifest)
        for version in (2, 3):
            publish(sender, named, version)


@settings(max_examples=30, deadline=None)
@given(named=state_dicts(), bucket=BUCKET, bit=st.integers(0, 7), data=st.data())
@pytest.mark.parametrize("kind", LINKS)
def test_one_bit_flipped_before_the_publication_is_caught(
    kind: str, named: Named, bucket: int, bit: int, data: st.DataObject
) -> None:
    """In the arena, while it is still open; or in the trainer's copy, from which files and objects are made."""
    named = [("w", torch.ones(700, 500)), *((f"x.{name}", tensor) for name, tensor in named)]
    with closing(link_with_buckets(kind, bucket)) as link:
        sender = link.sender(nonfinite="off")
        sender.capture(named, 1)
        snapshot = sender._captured  # type: ignore[attr-defined]  # noqa: SLF001
        meta = data.draw(st.sampled_from([meta for meta in snapshot.manifest.tensors if meta.nbytes]))
        snapshot.buffer[meta.offset + data.draw(st.integers(0, meta.nbytes - 1))] ^= 1 << bit
        manifest = sender.publish().manifest
        del snapshot
        with pytest.raises(DigestMismatch, match="replica-0 staged"):
            link.receiver().stage(manifest)
        publish(sender, named, 2)


def test_verification_off_takes_no_digest(link: Link) -> None:
    manifest = publish(link.sender(), [("w", torch.ones(4))], 1)
    link.flip(manifest, 0, 0)
    staged = link.receiver(verify="off").stage(manifest)
    assert staged.digest == ""
    assert staged.tensors["w"][0] != 1


def test_a_version_is_a_copy(link: Link) -> None:
    weight = torch.ones(4)
    manifest = publish(link.sender(), [("w", weight)], 1)
    weight.fill_(2)
    assert link.receiver().stage(manifest).tensors["w"].tolist() == [1.0] * 4


def test_parameters_with_gradients_are_captured(link: Link) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    staged = roundtrip(link, [("w", weight)])
    assert not staged.tensors["w"].requires_grad
    assert weight.requires_grad
