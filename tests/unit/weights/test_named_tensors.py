"""Names and ties: every name of a model is seen, and only equal storage makes an alias."""

from __future__ import annotations

import pytest
import torch

from paceline.core.errors import CoverageError, SyncError
from paceline.weights.digest import dense_bytes
from paceline.weights.named_tensors import collect, split_aliases


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 3)
        self.head = torch.nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def test_collect_has_every_name_and_no_volatile_buffer() -> None:
    named = collect(Tied())
    assert [name for name, _ in named] == ["embed.weight", "head.weight", "scale"]
    assert named[0][1] is named[1][1]


def test_a_shared_module_is_seen_under_each_path() -> None:
    layer = torch.nn.BatchNorm1d(2)
    names = [name for name, _ in collect(torch.nn.Sequential(layer, layer))]
    assert names.count("0.weight") == names.count("1.weight") == 1
    assert {"0.running_mean", "1.running_mean", "0.num_batches_tracked"} <= set(names)


def test_a_tie_is_one_tensor_and_an_alias() -> None:
    stored, aliases = split_aliases(collect(Tied()))
    assert list(stored) == ["embed.weight", "scale"]
    assert aliases == {"head.weight": "embed.weight"}


def test_three_names_have_one_stored_name() -> None:
    weight = torch.ones(2)
    assert split_aliases([("a", weight), ("b", weight), ("c", weight.view(2))])[1] == {"b": "a", "c": "a"}


@pytest.mark.parametrize(
    "other",
    [
        lambda base: base[1:],
        lambda base: base.view(3, 4),
        lambda base: base.t(),
        lambda base: base.view(torch.int32),
        lambda base: base.clone(),
    ],
)
def test_what_differs_in_place_shape_stride_or_type_is_no_alias(other: object) -> None:
    base = torch.arange(12.0).view(4, 3)
    assert callable(other)
    stored, aliases = split_aliases([("a", base), ("b", other(base))])
    assert (len(stored), aliases) == (2, {})


def test_a_lazy_conjugate_is_no_alias() -> None:
    base = torch.tensor([1 + 2j])
    assert split_aliases([("a", base), ("b", base.conj())])[1] == {}


def test_empty_tensors_are_no_aliases() -> None:
    empty = torch.zeros(0, 3)
    assert split_aliases([("a", empty), ("b", empty)])[1] == {}


def test_doubled_names_are_all_named() -> None:
    one = torch.ones(1)
    with pytest.raises(CoverageError, match="b, c"):
        split_aliases([("c", one), ("b", one), ("a", one), ("b", one), ("c", one)])


def test_what_has_no_plain_bytes_is_refused_by_name() -> None:
    with pytest.raises(SyncError, match="'lost'"):
        split_aliases([("lost", torch.zeros(2, device="meta"))])
    with pytest.raises(SyncError, match="'thin'"):
        split_aliases([("thin", torch.eye(2).to_sparse())])


@pytest.mark.parametrize("name", ["int4", "uint4", "uint1", "float4_e2m1fn_x2", "bits8", "bool"])
def test_strided_tensors_of_types_that_torch_cannot_copy_are_stored_all_the_same(name: str) -> None:
    raw = torch.arange(6, dtype=torch.uint8).remainder(2).view(2, 3)
    tensor = raw.view(getattr(torch, name))
    stored, aliases = split_aliases([("a", tensor.t()), ("b", tensor), ("c", tensor.t())])
    assert aliases == {"c": "a"}
    assert dense_bytes(stored["a"]).tolist() == [0, 1, 1, 0, 0, 1]
    assert dense_bytes(tensor.t()).tolist() == [0, 1, 1, 0, 0, 1]
    assert stored["b"] is tensor
