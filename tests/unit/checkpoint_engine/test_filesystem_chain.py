"""Chains of deltas over files: who replays what, what stays, what a slow reader and a crash see."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from paceline.checkpoint_engine.filesystem import FilesystemSender
from paceline.checkpoint_engine.filesystem_follower import FilesystemFollower
from paceline.checkpoint_engine.filesystem_opening import open_storage
from paceline.core.errors import SyncError
from paceline.core.manifest import WeightManifest
from paceline.core.version import Version
from paceline.runtime.system import InlineWork, SystemClock
from paceline.testing.publication import publish
from tests.unit.checkpoint_engine.failing_filesystem import FailingFileSystem, Stopped
from tests.unit.checkpoint_engine.roots import HookedClock, names_below, object_root, receiver, rewrite

ELEMENTS = 50_000


@pytest.fixture(params=["local", "objects"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{tmp_path}/weights" if request.param == "local" else object_root()


class Chain:
    """A sender that publishes version after version, each against the one before."""

    def __init__(self, url: str, *, full_every: int = 4, keep: int = 9, life: int = 1) -> None:
        self.url = url
        self.life = life
        self.weight = torch.zeros(ELEMENTS, dtype=torch.int32)
        self.made: list[WeightManifest] = []
        self.sender = FilesystemSender(
            url=url, clock=SystemClock(), keep_versions=keep, keep_seconds=0, delta="delta", full_every=full_every
        )

    def next(self, share: float = 0.002, base: int | None = None) -> WeightManifest:
        """One more version; `base` is the index of what replicas serve, the newest when it is not given."""
        n = len(self.made)
        self.weight[: int(share * ELEMENTS)] += 1
        if base is None:
            base = n - 1
        base_version = self.made[base].version if self.made else None
        self.made.append(publish(self.sender, self.named(), Version(self.life, n).packed, base_version))
        return self.made[-1]

    def named(self) -> list[tuple[str, torch.Tensor]]:
        return [("w", self.weight), ("tied", self.weight)]


def kept(url: str) -> list[int]:
    return [version.n for version in open_storage(url).versions()]


def kinds(url: str) -> str:
    """F: whole; d: a delta alone; b: both."""
    names = names_below(url)
    text = ""
    for version in open_storage(url).versions():
        whole = any(name.startswith(f"{version}/weights-") for name in names)
        text += ("b" if whole else "d") if f"{version}/delta.bin" in names else "F"
    return text


def test_every_so_many_versions_are_whole_and_have_a_delta_too(url: str) -> None:
    chain = Chain(url, full_every=3)
    for _ in range(8):
        chain.next()
    assert kinds(url) == "FddbddbF"[:7] + "d"


def test_who_has_nothing_replays_the_chain_from_the_nearest_whole_version(url: str) -> None:
    chain = Chain(url)
    for _ in range(4):
        chain.next()
    assert kinds(url) == "Fddd"
    staged = receiver(url).stage(chain.made[-1])
    assert torch.equal(staged.tensors["w"], chain.weight)
    assert staged.tensors["w"].data_ptr() == staged.tensors["tied"].data_ptr()
    assert (staged.base_version, staged.taken_bytes) == (None, 4 * ELEMENTS)


def test_who_missed_versions_replays_the_deltas_since(url: str) -> None:
    chain, reader = Chain(url, full_every=2), receiver(url)
    chain.next()
    served = reader.stage(chain.made[0])
    for _ in range(3):
        chain.next()
    assert kinds(url) == "Fdbd"
    staged = reader.stage(chain.made[3], served)
    assert torch.equal(staged.tensors["w"], chain.weight)
    deltas = [manifest.delta.nbytes for manifest in chain.made if manifest.delta is not None]
    assert (staged.base_version, staged.taken_bytes) == (chain.made[0].version, sum(deltas))
    assert sum(deltas) < ELEMENTS


def test_a_whole_version_is_taken_where_that_is_less(url: str) -> None:
    chain, reader = Chain(url, full_every=3), receiver(url)
    chain.next()
    served = reader.stage(chain.made[0])
    noise = torch.Generator().manual_seed(0)
    for _ in range(4):
        chain.weight.copy_(torch.randint(-(1 << 31), (1 << 31) - 1, (ELEMENTS,), generator=noise, dtype=torch.int64))
        chain.next()
    staged = reader.stage(chain.made[-1], served)
    assert staged.base_version is None
    assert torch.equal(staged.tensors["w"], chain.weight)


def test_a_follower_finds_a_delta_and_reads_it(url: str) -> None:
    chain = Chain(url)
    for _ in range(3):
        chain.next()
    found = FilesystemFollower(url, clock=HookedClock(), work=InlineWork()).latest()
    assert found == chain.made[-1]
    assert found is not None
    assert found.delta is not None
    assert torch.equal(receiver(url).stage(found).tensors["w"], chain.weight)


# ---- retention ------------------------------------------------------------------------------------------------------


def test_what_a_kept_chain_needs_is_not_removed(url: str) -> None:
    chain = Chain(url, full_every=4, keep=2)
    seen = []
    for _ in range(11):
        chain.next()
        seen.append((kinds(url), kept(url)))
        assert torch.equal(receiver(url).stage(chain.made[-1]).tensors["w"], chain.weight)
    assert seen[3] == ("Fddd", [0, 1, 2, 3])
    assert seen[4] == ("Fdddb", [0, 1, 2, 3, 4])  # 3 is kept, and needs all before it
    assert seen[5] == ("bd", [4, 5])
    assert seen[7] == ("bddd", [4, 5, 6, 7])
    assert seen[9] == ("bd", [8, 9])


def test_a_base_that_is_not_the_version_before_is_kept_for_the_chain(url: str) -> None:
    """Versions 1 and 2 reached nobody: 3 is a delta of 0."""
    chain = Chain(url, full_every=9, keep=2)
    chain.next()
    chain.next(base=0)
    chain.next(base=0)
    chain.next(base=0)
    assert kept(url) == [0, 2, 3]
    assert torch.equal(receiver(url).stage(chain.made[3]).tensors["w"], chain.weight)


def test_a_slow_reader_on_a_disk_keeps_all_of_its_chain(tmp_path: Path) -> None:
    url = f"{tmp_path}/weights"
    chain = Chain(url, full_every=4, keep=2)
    for _ in range(3):
        chain.next()
    wanted, expected = chain.made[2], chain.weight.clone()

    def publish_more() -> None:
        for _ in range(7):
            chain.next()

    staged = receiver(url, clock=HookedClock(publish_more, after=2)).stage(wanted)
    assert torch.equal(staged.tensors["w"], expected)
    assert kept(url)[:3] == [0, 1, 2]
    chain.next()
    assert kept(url)[0] >= 8


def test_a_chain_that_went_while_it_was_read_is_refused() -> None:
    url = object_root()
    chain = Chain(url, full_every=4, keep=2)
    for _ in range(3):
        chain.next()

    def publish_more() -> None:
        for _ in range(7):
            chain.next()

    with pytest.raises(SyncError, match="is gone"):
        receiver(url, clock=HookedClock(publish_more, after=2)).stage(chain.made[2])


def test_a_later_life_knows_what_the_chains_of_an_earlier_one_need(url: str) -> None:
    earlier = Chain(url, full_every=9, keep=3)
    for _ in range(3):
        earlier.next()
    earlier.sender.close()
    again = Chain(url, full_every=9, keep=3, life=2)
    again.next()
    assert kinds(url) == "FddF"
    again.next()
    found = [str(version) for version in open_storage(url).versions()]
    assert found == ["1.0", "1.1", "1.2", "2.0", "2.1"]  # 1.2 is one of three, and needs the two before it
    again.next()
    assert [str(version) for version in open_storage(url).versions()] == ["2.0", "2.1", "2.2"]


# ---- crashes and forgeries ------------------------------------------------------------------------------------------


@pytest.fixture
def failing() -> Iterator[type[FailingFileSystem]]:
    fsspec.register_implementation("failing", FailingFileSystem, clobber=True)
    yield FailingFileSystem
    FailingFileSystem.failures.clear()
    FailingFileSystem.after = 0


@pytest.mark.parametrize("written", range(4))
def test_a_writer_that_is_gone_after_any_file_of_a_delta_has_published_nothing(
    failing: type[FailingFileSystem], written: int
) -> None:
    """A delta alone has three files."""
    url = f"failing://{secrets.token_hex(8)}/weights"
    chain = Chain(url)
    chain.next()
    before = chain.weight.clone()
    failing.after = written
    failing.failures.append(Stopped())
    if written < 3:
        with pytest.raises(Stopped):
            chain.next()
    else:
        chain.next()
    failing.failures.clear()
    found = FilesystemFollower(url, clock=HookedClock(), work=InlineWork()).latest()
    assert found is not None
    assert Version.unpack(found.version).n == (0 if written < 3 else 1)
    expected = before if written < 3 else chain.weight
    assert torch.equal(receiver(url).stage(found).tensors["w"], expected)


def delta(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda tree: tree["weights"]["delta"].update(changes)


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "base after it": delta(base_version=Version(1, 5).packed),
    "base is itself": delta(base_version=Version(1, 2).packed),
    "negative base": delta(base_version=-1),
    "base that is not there": delta(base_version=Version(0, 7).packed),
    "other base": delta(base_version=Version(1, 0).packed),
    "base digest": delta(base_digest="0" * 32),
    "length": delta(nbytes=7),
    "huge": delta(nbytes=1 << 50),
    "nothing": delta(nbytes=0),
    "place": delta(arena_id="../1.1"),
    "offset": delta(offset=8),
    "level": delta(level="other"),
    "unknown field": delta(extra=1),
    "no delta": lambda tree: tree["weights"].update(delta=None),
    "kind": lambda tree: tree.update(kind="full"),
}


@pytest.mark.parametrize("case", FORGERIES)
def test_a_forged_delta_is_refused(tmp_path: Path, case: str) -> None:
    root = tmp_path / "weights"
    chain = Chain(str(root))
    for _ in range(3):
        chain.next()
    rewrite(root / "1.2", FORGERIES[case])
    follower = FilesystemFollower(str(root), clock=HookedClock(), work=InlineWork())

    def follow() -> None:
        found = follower.latest()
        assert found is not None
        receiver(str(root)).stage(found)

    with pytest.raises(SyncError):
        follow()


def test_a_delta_file_of_another_version_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "weights"
    chain = Chain(str(root))
    for _ in range(3):
        chain.next()
    (root / "1.2/delta.bin").write_bytes((root / "1.1/delta.bin").read_bytes())
    with pytest.raises(SyncError):
        receiver(str(root)).stage(chain.made[2])
