"""The tree digest: what counts, what does not, and that every way of taking it agrees."""

from __future__ import annotations

import msgspec
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.weights.digest import dense_bytes, digest_tensors
from paceline.weights.digesting_copy import CopyJob, copy_and_digest
from paceline.weights.tree_digest import LEAF_BYTES, bytes_digest, leaf_digest, root_digest, tensor_digest


def test_the_scheme_is_as_written() -> None:
    data = bytes(range(256)) * 4096 + b"tail"
    leaves = xxhash.xxh3_128_digest(data[:LEAF_BYTES]) + xxhash.xxh3_128_digest(b"tail")
    tensor = xxhash.xxh3_128_digest(leaves)
    assert bytes_digest(data) == tensor
    text = msgspec.json.encode(["paceline-tree-1", [["w", "uint8", [len(data)], tensor.hex()]], [["z", "w"]]])
    entries = {"w": ("uint8", (len(data),), tensor)}
    assert root_digest(entries, {"z": "w"}) == xxhash.xxh3_128_hexdigest(text)


def test_leaves_compose_in_any_division() -> None:
    data = memoryview(torch.randint(0, 256, (3 * LEAF_BYTES + 7,), dtype=torch.uint8).numpy().tobytes())
    shards = [data[: 2 * LEAF_BYTES], data[2 * LEAF_BYTES :]]
    leaves = [
        leaf_digest(shard[start : start + LEAF_BYTES]) for shard in shards for start in range(0, len(shard), LEAF_BYTES)
    ]
    assert tensor_digest(leaves) == bytes_digest(data)


def test_order_and_strides_do_not_count() -> None:
    a, b = torch.arange(6.0).view(2, 3), torch.arange(8.0)[::2]
    one = digest_tensors({"a": a, "b": b}, {})
    assert digest_tensors({"b": b.clone(), "a": a.t().contiguous().t()}, {}) == one


def test_a_single_element_with_a_wide_stride_is_dense() -> None:
    one = torch.arange(16.0)[8::8]
    target = torch.zeros(1)
    assert copy_and_digest([CopyJob("w", one, target)], "off").digests["w"] == bytes_digest(one.numpy().tobytes())
    assert digest_tensors({"w": one}, {}) == digest_tensors({"w": torch.tensor([8.0])}, {})


def test_which_tied_name_is_stored_does_not_count_but_the_tie_does() -> None:
    w = torch.ones(2)
    tied = digest_tensors({"embed": w, "head": w}, {"head": "embed"})
    assert digest_tensors({"head": w}, {"embed": "head"}) == tied
    assert digest_tensors({"embed": w, "head": w}, {}) != tied
    assert digest_tensors({"m": w}, {"a": "m", "z": "m"}) == digest_tensors({"z": w}, {"a": "z", "m": "z"})


@pytest.mark.parametrize(
    "other",
    [
        {"v": torch.ones(4)},
        {"w": torch.ones(2, 2)},
        {"w": torch.ones(4).view(torch.int32)},
        {"w": torch.tensor([1.0, 1.0, 1.0, -1.0])},
        {"w": torch.ones(4), "x": torch.ones(0)},
        {},
    ],
)
def test_name_shape_type_value_and_number_count(other: dict[str, torch.Tensor]) -> None:
    assert digest_tensors(other, {}) != digest_tensors({"w": torch.ones(4)}, {})


def test_the_sign_of_zero_and_the_payload_of_nan_count() -> None:
    assert digest_tensors({"w": torch.tensor(0.0)}, {}) != digest_tensors({"w": torch.tensor(-0.0)}, {})
    nans = torch.tensor([0x7FC0, 0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    assert digest_tensors({"w": nans[0]}, {}) != digest_tensors({"w": nans[1]}, {})


def test_threads_do_not_count() -> None:
    tensors = {f"t{i}": torch.randn(700_000 if i == 2 else i) for i in range(5)}
    assert digest_tensors(tensors, {}, threads=3) == digest_tensors(tensors, {})


TYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.uint16]


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    dtype=st.sampled_from(TYPES),
    turn=st.randoms(use_true_random=False),
    threads=st.integers(1, 3),
)
def test_the_copy_takes_the_digest_of_what_it_wrote(
    shape: list[int], dtype: torch.dtype, turn: object, threads: int
) -> None:
    order = list(range(len(shape)))
    turn.shuffle(order)  # type: ignore[attr-defined]
    source = torch.randint(0, 100, shape).to(dtype).permute(order)
    if dtype == torch.complex64:
        source = source.conj()
    target = torch.zeros(source.shape, dtype=dtype)
    result = copy_and_digest([CopyJob("w", source, target)], "error", threads)
    assert torch.equal(target, source)
    assert result.digests["w"] == bytes_digest(dense_bytes(source).data)
    assert result.nonfinite == {}


@pytest.mark.parametrize("elements", [0, 1, (1 << 20) // 2, (1 << 20) // 2 + 1, 5_000_001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_leaf_borders_with_and_without_a_cast(elements: int, dtype: torch.dtype) -> None:
    source = torch.randn(elements)
    target = torch.zeros(elements, dtype=dtype)
    result = copy_and_digest([CopyJob("w", source, target)], "off", threads=2)
    assert torch.equal(target, source.to(dtype))
    assert result.digests["w"] == bytes_digest(dense_bytes(source.to(dtype)).data)
