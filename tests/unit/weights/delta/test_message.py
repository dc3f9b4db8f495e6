"""A message that is cut, changed or lies is refused, before memory is reserved and before a tensor is touched."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
import zstandard
from msgspec.structs import replace

from paceline.core.errors import CoverageError, DigestMismatch, SyncError
from paceline.weights.delta import DeltaHeader, decode_header, prepare, read_delta
from paceline.weights.delta.message import Run, write_delta
from paceline.weights.delta.planes import Level
from tests.unit.weights.delta.cases import BASE_DIGEST, LEVELS, TARGET_DIGEST, copies, encoded, same_bits, trained


def versions() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    pairs = {f"layer.{index}": trained(4000, 1e-5, index) for index in range(2)}
    return {name: old for name, (old, _) in pairs.items()}, {name: new for name, (_, new) in pairs.items()}


def parts(level: Level) -> tuple[DeltaHeader, bytes]:
    data = encoded(*versions(), level).data
    delta = read_delta(data)
    return delta.header, bytes(delta.body)


def lying(header: DeltaHeader, body: bytes, **changes: Any) -> bytes:
    """A message whose digest is right and whose header says something else."""
    told = replace(header, body_digest=xxhash.xxh3_128_hexdigest(body), **changes)
    return write_delta(told, [body])


def test_the_header_tells_what_it_is_for() -> None:
    base, target = versions()
    delta = encoded(base, target, "small")
    header = decode_header(delta.data)
    assert header == delta.header
    assert (header.base_version, header.version, header.level) == (4, 5, "small")
    assert (header.base_digest, header.target_digest) == (BASE_DIGEST, TARGET_DIGEST)
    assert (header.total, header.full_bytes) == (8000, 16000)
    assert sum(changed for changed, _ in delta.per_tensor.values()) == header.changed
    assert sum(nbytes for _, nbytes in delta.per_tensor.values()) == header.body_bytes


@pytest.mark.parametrize("level", LEVELS)
def test_every_cut_is_refused(level: Level) -> None:
    data = encoded(*versions(), level).data
    for end in [*range(40), *range(40, len(data), 97), len(data) - 1]:
        with pytest.raises(SyncError):
            read_delta(data[:end])
    with pytest.raises(SyncError):
        read_delta(data + b"\0")


@pytest.mark.parametrize("level", LEVELS)
def test_every_changed_byte_is_refused(level: Level) -> None:
    data = encoded(*versions(), level).data
    for place in range(0, len(data), 11):
        wrong = bytearray(data)
        wrong[place] ^= 0x10
        with pytest.raises((SyncError, CoverageError)):
            prepare(read_delta(bytes(wrong)), versions()[0], base_digest=BASE_DIGEST)


@pytest.mark.parametrize("level", LEVELS)
def test_payloads_with_a_right_digest_and_wrong_content_are_refused_or_harmless(level: Level) -> None:
    header, body = parts(level)
    base = versions()[0]
    refused = 0
    for place in range(0, len(body), 7):
        wrong = bytearray(body)
        wrong[place] ^= 0x21
        tensors = copies(base)
        try:
            prepared = prepare(read_delta(lying(header, bytes(wrong))), tensors, base_digest=BASE_DIGEST)
        except SyncError:
            refused += 1
        else:  # plain bits may say another number: positions are still inside
            assert all(step.positions.max() < 4000 for step in prepared.steps)  # type: ignore[union-attr]
        assert same_bits(tensors, base)
    assert refused > 0.5 * len(range(0, len(body), 7))


def run_with(header: DeltaHeader, **changes: Any) -> dict[str, Any]:
    return {"runs": (replace(header.runs[0], **changes), *header.runs[1:])}


def test_runs_that_lie_are_refused() -> None:
    header, body = parts("small")
    first = header.runs[0]
    lies: list[dict[str, Any]] = [
        run_with(header, nbytes=first.nbytes + 4),
        run_with(header, nbytes=-4),
        run_with(header, words=first.words + 2**40),
        run_with(header, words=0),
        run_with(header, counts=(2**60, *first.counts[1:])),
        run_with(header, counts=(-1, *first.counts[1:])),
        run_with(header, counts=first.counts[1:]),
        run_with(header, edges=(5, 5)),
        run_with(header, edges=(2**40, *first.edges[1:])),
        run_with(header, tables=bytes([255]) + first.tables[1:]),
        run_with(header, table_set=9),
        run_with(header, mode=7),
        run_with(header, mode=1),
        run_with(header, tensor=5),
        {"runs": (header.runs[1], header.runs[0])},
        {"run_elements": 2**40},
        {"run_elements": 0},
        {"changed": header.changed + 1},
        {"body_bytes": header.body_bytes + 1},
        {"base_digest": "x" * 32},
        {"version": -1},
    ]
    for lie in lies:
        with pytest.raises(SyncError):
            read_delta(lying(header, body, **lie))


def test_sizes_that_only_the_tensors_disprove_are_refused() -> None:
    header, body = parts("fast")
    base = versions()[0]
    run = header.runs[0]
    many = replace(run, counts=(5000,))
    lies: list[dict[str, Any]] = [
        {"runs": (many, header.runs[1]), "changed": 5000 + header.runs[1].changed, "total": 10**6},
        {"runs": (header.runs[0], replace(header.runs[1], tensor=2))},
        {"runs": (header.runs[0], replace(header.runs[1], start=1))},
    ]
    for lie in lies:
        delta = read_delta(lying(header, body, **lie))
        with pytest.raises(SyncError):
            prepare(delta, base, base_digest=BASE_DIGEST)


def test_tables_that_no_encoder_writes_are_refused() -> None:
    header, body = parts("small")
    known = header.table_sets[0]
    for wrong in (b"", b"\0", known.gaps[0][:-1], bytes(3), known.gaps[0][:-2] + b"\xff\xff"):
        told = (replace(known, gaps=(wrong, *known.gaps[1:])),)
        with pytest.raises(SyncError):
            prepare(read_delta(lying(header, body, table_sets=told)), versions()[0], base_digest=BASE_DIGEST)


def test_a_header_that_unpacks_to_too_much_is_refused() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    with pytest.raises(SyncError, match="claims 1048576 bytes, 100 are due"):
        read_delta(struct.pack("<8sIIQ", b"PACEDLT1", len(bomb), 100, 0) + bomb)
    with pytest.raises(SyncError, match="claims a header"):
        read_delta(struct.pack("<8sIIQ", b"PACEDLT1", len(bomb), 2**31, 0) + bomb)


def test_a_header_that_is_nested_too_deeply_is_refused() -> None:
    header, body = parts("fast")
    nested = b"\x91" * 100_000 + b"\xc0"
    known = msgspec.msgpack.encode(header)
    assert 0x90 <= known[0] < 0x9F  # an array of at most 15; one more element, which no header has
    for plain in (nested, bytes([known[0] + 1]) + known[1:] + nested):
        packed = zstandard.ZstdCompressor().compress(plain)
        prefix = struct.pack("<8sIIQ", b"PACEDLT1", len(packed), len(plain), xxhash.xxh3_64_intdigest(plain))
        with pytest.raises(SyncError, match="cannot be read"):
            read_delta(prefix + packed + body)


def test_a_dense_payload_that_unpacks_to_another_size_is_refused() -> None:
    old, new = torch.zeros(1000, dtype=torch.int64), torch.zeros(1000, dtype=torch.int64)
    bits = np.random.default_rng(0).integers(0, 2**62, 1000)
    delta = encoded({"w": old}, {"w": torch.from_numpy(bits) + new}, "fast")
    packed = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    run = Run(0, 0, 2, len(packed), 0, (), (1000,), b"", 0)
    data = lying(delta.header, packed, runs=(run,), body_bytes=len(packed), changed=1000)
    with pytest.raises(SyncError, match="claims 1048576 bytes, 8000 are due"):
        prepare(read_delta(data), {"w": old}, base_digest=BASE_DIGEST)


def test_another_body_is_refused_by_its_digest() -> None:
    header, body = parts("fast")
    with pytest.raises(DigestMismatch):
        read_delta(write_delta(header, [body[:-1] + bytes([body[-1] ^ 1])]))


def test_a_header_of_another_shape_is_refused() -> None:
    for plain in (msgspec.msgpack.encode([1, 2]), b"\xff\xff", b""):
        packed = zstandard.ZstdCompressor().compress(plain)
        proof = xxhash.xxh3_64_intdigest(plain)
        with pytest.raises(SyncError):
            read_delta(struct.pack("<8sIIQ", b"PACEDLT1", len(packed), len(plain), proof) + packed)
