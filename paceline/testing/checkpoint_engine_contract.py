"""What every checkpoint engine promises (`core.weight_ports`), as functions that raise AssertionError.

    for promise in CHECKPOINT_ENGINE_CONTRACT:
        promise(BothEnds(sender=my_sender(arenas=2), receiver=my_receiver))

Each takes a fresh sender, which refuses weights that are not finite, and a function that makes receivers by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from msgspec.structs import replace

from paceline.core.errors import NonFiniteWeights, SyncError, VersionError
from paceline.core.manifest import WeightManifest
from paceline.core.weight_ports import StagedWeights, WeightReceiver, WeightSender
from paceline.testing.publication import publish
from paceline.weights.digest import dense_bytes, digest_tensors
from paceline.weights.named_tensors import split_aliases

Named = list[tuple[str, torch.Tensor]]
E = TypeVar("E", bound=Exception)


@dataclass(frozen=True)
class BothEnds:
    """A sender with two places for versions, and `receiver(holder)`; both without a version."""

    sender: WeightSender
    receiver: Callable[[str], WeightReceiver]


def every_bit_arrives_and_the_digest_is_of_the_bits(ends: BothEnds) -> None:
    """Scalars, empty tensors, strided views, tied names and all widths, compared with a digest taken apart."""
    tied = torch.arange(6.0)
    named: Named = [
        ("scalar", torch.tensor(2.5)),
        ("empty", torch.zeros(0, 3)),
        ("strided", torch.arange(8.0)[::2]),
        ("transposed", torch.arange(6.0).reshape(2, 3).t()),
        ("half", torch.arange(10).bfloat16()[3:8]),
        ("bytes", torch.arange(7, dtype=torch.uint8)),
        ("wide", torch.tensor([2**53 + 1, -1])),
        ("tied", tied),
        ("tied_too", tied),
    ]
    staged = ends.receiver("a").stage(publish(ends.sender, named, 1))
    _is(staged, named)
    assert staged.tensors["tied"].data_ptr() == staged.tensors["tied_too"].data_ptr()


def what_is_changed_after_the_capture_does_not_arrive(ends: BothEnds) -> None:
    """The optimiser is free once `capture` has returned, before the publication and after it."""
    named = _version(1)
    ends.sender.capture(named, 1)
    expected = [(name, tensor.clone()) for name, tensor in named]
    named[0][1].add_(1.0)
    manifest = ends.sender.publish().manifest
    named[0][1].add_(1.0)
    _is(ends.receiver("a").stage(manifest), expected)


def a_staged_version_stays_whole_until_it_is_released(ends: BothEnds) -> None:
    """Whatever is published meanwhile; where that has no room left, it is refused with the name of the holder."""
    staged = ends.receiver("the holder").stage(publish(ends.sender, _version(1), 1))
    for version in (2, 3, 4):
        error = _error(SyncError, publish, ends.sender, _version(version), version)
        assert error is None or "the holder" in str(error)
    _is(staged, _version(1))
    staged.release()
    _is(ends.receiver("b").stage(publish(ends.sender, _version(9), 9)), _version(9))


def nothing_is_held_after_a_receiver_was_closed(ends: BothEnds) -> None:
    """As many versions as one likes can follow."""
    for version in range(1, 7):
        assert not ends.sender.blocking_holders()
        receiver = ends.receiver("a")
        _is(receiver.stage(publish(ends.sender, _version(version), version)), _version(version))
        receiver.close()


def a_version_that_is_gone_is_refused(ends: BothEnds) -> None:
    """Its place may be another version's by now: what is staged by its manifest is that version, or nothing."""
    old = publish(ends.sender, _version(1), 1)
    for version in (2, 3, 4):
        publish(ends.sender, _version(version), version)
    staged: list[StagedWeights] = []
    if _error(SyncError, lambda: staged.append(ends.receiver("a").stage(old))) is None:
        _is(staged[0], _version(1))


def versions_only_rise(ends: BothEnds) -> None:
    """What is not newer is refused; the newest can still be staged."""
    newest = publish(ends.sender, _version(5), 5)
    for older in (5, 4):
        assert _error(VersionError, publish, ends.sender, _version(older), older)
    _is(ends.receiver("a").stage(newest), _version(5))


def weights_that_are_not_finite_are_not_published(ends: BothEnds) -> None:
    """The version before is untouched, and the number is free for weights that are sound."""
    before = publish(ends.sender, _version(1), 1)
    broken = _version(2)
    broken[0][1][3] = float("nan")
    assert _error(NonFiniteWeights, publish, ends.sender, broken, 2)
    _is(ends.receiver("a").stage(before), _version(1))
    _is(ends.receiver("b").stage(publish(ends.sender, _version(2), 2)), _version(2))


def a_manifest_that_cannot_be_right_is_refused(ends: BothEnds) -> None:
    """Another digest, more bytes than there are: nothing is staged, nothing stays held."""
    manifest = publish(ends.sender, _version(1), 1)
    wrong: Sequence[WeightManifest] = (
        replace(manifest, digest="0" * len(manifest.digest)),
        replace(manifest, total_bytes=manifest.total_bytes * 1000),
    )
    for lie in wrong:
        receiver = ends.receiver("a")
        assert _error(SyncError, receiver.stage, lie)
        receiver.close()
    assert not ends.sender.blocking_holders()
    _is(ends.receiver("a").stage(manifest), _version(1))


def _version(number: int) -> Named:
    return [("weight", torch.full((1000,), float(number))), ("count", torch.tensor([number]))]


def _is(staged: StagedWeights, named: Named) -> None:
    stored, aliases = split_aliases(named)
    assert staged.digest == staged.manifest.digest == digest_tensors(stored, aliases)
    assert staged.tensors.keys() == {name for name, _ in named}
    for name, tensor in named:
        mine = staged.tensors[name]
        assert (mine.shape, mine.dtype) == (tensor.shape, tensor.dtype)
        assert dense_bytes(mine).tobytes() == dense_bytes(tensor).tobytes()


def _error(kind: type[E], call: Callable[..., object], *arguments: object) -> E | None:
    """The error of this kind that the call raises, None when it raises none."""
    try:
        call(*arguments)
    except kind as error:
        return error
    return None


CHECKPOINT_ENGINE_CONTRACT: Sequence[Callable[[BothEnds], None]] = (
    every_bit_arrives_and_the_digest_is_of_the_bits,
    what_is_changed_after_the_capture_does_not_arrive,
    a_staged_version_stays_whole_until_it_is_released,
    nothing_is_held_after_a_receiver_was_closed,
    a_version_that_is_gone_is_refused,
    versions_only_rise,
    weights_that_are_not_finite_are_not_published,
    a_manifest_that_cannot_be_right_is_refused,
)
