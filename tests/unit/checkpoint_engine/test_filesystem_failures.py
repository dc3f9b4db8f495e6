"""Whatever ends a write, the last whole version stays readable and the next start clears what was left."""

from __future__ import annotations

import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

from paceline.checkpoint_engine.filesystem_follower import FilesystemFollower
from paceline.core.errors import CapacityError, ConfigError, NonFiniteWeights, SyncError, VersionError
from paceline.core.manifest import WeightManifest
from paceline.runtime.system import InlineWork
from paceline.testing.publication import publish
from tests.unit.checkpoint_engine.failing_filesystem import FailingFileSystem, Stopped, no_space
from tests.unit.checkpoint_engine.roots import (
    V1,
    V2,
    V3,
    HookedClock,
    names_below,
    object_root,
    receiver,
    sender,
    weights,
)

ROOTS = ["local", "objects"]


@pytest.fixture(params=ROOTS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{tmp_path}/weights" if request.param == "local" else object_root()


@pytest.fixture
def failing() -> Iterator[type[FailingFileSystem]]:
    fsspec.register_implementation("failing", FailingFileSystem, clobber=True)
    yield FailingFileSystem
    FailingFileSystem.failures.clear()
    FailingFileSystem.after = 0


def latest(url: str) -> WeightManifest:
    found = FilesystemFollower(url, clock=HookedClock(), work=InlineWork()).latest()
    assert found is not None
    return found


# ---- a process that ends in the middle of a write -------------------------------------------------------------------


@pytest.mark.parametrize("written", range(6))
def test_a_writer_that_is_gone_after_any_file_has_published_nothing(
    failing: type[FailingFileSystem], written: int
) -> None:
    """A version of this test has five files; after the fifth, the marker, it is there."""
    url = f"failing://{secrets.token_hex(8)}/weights"
    first = publish(sender(url, shard_bytes=30), weights(1.0), V1)
    failing.after = written
    failing.failures.append(Stopped())
    writer = sender(url, shard_bytes=30)
    if written < 5:
        with pytest.raises(Stopped):
            publish(writer, weights(2.0), V2)
    else:
        publish(writer, weights(2.0), V2)
    failing.failures.clear()
    assert latest(url).version == (V2 if written >= 5 else V1)
    assert receiver(url).stage(first).tensors["norm"].tolist() == [1.0] * 7
    again = sender(url, shard_bytes=30)
    leftovers = [name for name in names_below(url) if name.startswith("1.2/")]
    assert len(leftovers) == (5 if written >= 5 else 0)
    assert receiver(url).stage(publish(again, weights(3.0), V3)).tensors["norm"].tolist() == [3.0] * 7


def local_states(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Every state of a local root that a crash while 1.2 is written can leave, each as a directory."""
    made = sender(f"{tmp_path}/whole/weights", shard_bytes=30)
    publish(made, weights(1.0), V1)
    publish(made, weights(2.0), V2)
    made.close()
    written = sorted(path.name for path in (tmp_path / "whole/weights/1.2").glob("*.safetensors"))
    written += ["manifest.json", "COMPLETE"]
    assert len(written) == 5
    for index, name in enumerate(written):
        for share in (0.0, 0.5, 1.0):
            state = tmp_path / f"{index}-{share}/weights"
            shutil.copytree(tmp_path / "whole/weights", state)
            for later in written[index + 1 :]:
                (state / "1.2" / later).unlink()
            data = (state / "1.2" / name).read_bytes()
            (state / "1.2" / name).unlink()
            (state / f"1.2/.writing-{name}").write_bytes(data[: int(len(data) * share)])
            yield f"{name} {share}", state


def test_every_state_that_a_crash_can_leave_on_a_disk_is_cleared(tmp_path: Path) -> None:
    for name, state in local_states(tmp_path):
        assert latest(str(state)).version == V1, name
        again = sender(str(state))
        assert sorted(path.name for path in state.iterdir()) == ["1.1", "paceline-weights.json"], name
        assert receiver(str(state)).stage(publish(again, weights(2.0), V2)).tensors["norm"][0] == 2
        again.close()


WRITER = """
import sys, torch
from paceline.testing.publication import publish
from tests.unit.checkpoint_engine.roots import sender
from paceline.core.version import Version
made = sender(sys.argv[1], keep_versions=3, shard_bytes=1 << 20)
tensors = [(f"t{i}", torch.full((1 << 18,), 0.0)) for i in range(8)]
for n in range(1, 10_000):
    for _, tensor in tensors:
        tensor.fill_(n)
    publish(made, tensors, Version(1, n).packed)
"""


def test_a_killed_writer_leaves_whole_versions_and_its_lock_ends(tmp_path: Path) -> None:
    url = f"{tmp_path}/weights"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, url], cwd=Path(__file__).parents[3])
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "weights/1.3/COMPLETE").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        with pytest.raises(ConfigError, match="another process publishes"):
            sender(url)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=30)
    newest = latest(url)
    staged = receiver(url).stage(newest)
    n = newest.version & 0xFFFF
    assert n >= 3
    assert all((tensor == n).all() for tensor in staged.tensors.values())
    again = sender(url)
    assert publish(again, [("w", torch.ones(1))], newest.version + 1).version == newest.version + 1


# ---- a full disk ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", range(5))
def test_a_full_store_is_an_error_and_the_version_before_stays(failing: type[FailingFileSystem], after: int) -> None:
    url = f"failing://{secrets.token_hex(8)}/weights"
    made = sender(url, shard_bytes=30)
    first = publish(made, weights(1.0), V1)
    before = names_below(url)
    failing.after = after
    failing.failures.append(no_space())
    with pytest.raises(SyncError, match=r"1\.2 was not published: .* is full \(\d+ bytes needed, an unknown number"):
        publish(made, weights(2.0), V2)
    failing.failures.clear()
    assert names_below(url) == before
    assert receiver(url).stage(first).manifest.version == V1
    assert publish(made, weights(2.0), V2).version == V2


TINY_DISK = """
import subprocess, sys, torch
from paceline.testing.publication import publish
from tests.unit.checkpoint_engine.roots import V1, V2, V3, receiver, sender
from paceline.core.errors import CapacityError, SyncError
root = sys.argv[1]
if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", root], stderr=subprocess.DEVNULL).returncode:
    sys.exit(77)
made = sender(root + "/weights")
try:
    publish(made, [("w", torch.ones(6 << 20, dtype=torch.uint8))], V1)
    raise AssertionError("three versions of 6 MiB fit into 16 MiB")
except CapacityError as error:
    print(error)
made.close()
made = sender(root + "/weights")
weight = torch.ones(4 << 20, dtype=torch.uint8)
first = publish(made, [("w", weight)], V1)
with open(root + "/filler", "wb") as filler:
    filler.write(bytes(9 << 20))
try:
    publish(made, [("w", weight)], V2)
    raise AssertionError("4 MiB fit into 3 MiB")
except SyncError as error:
    print(error)
assert (receiver(root + "/weights").stage(first).tensors["w"] == 1).all()
open(root + "/filler", "wb").close()
assert receiver(root + "/weights").stage(publish(made, [("w", weight)], V3)).manifest.version == V3
"""


def test_c24_a_small_disk_is_refused_with_what_is_needed_and_free(tmp_path: Path) -> None:
    command = ["unshare", "-Urm", sys.executable, "-c", TINY_DISK, str(tmp_path)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("no file system can be mounted here")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "3 versions of 6291" in first
    assert "bytes are free" in first
    assert "1 versions of 4194" in second
    assert "bytes are free" in second


def test_c24_more_than_any_disk_is_refused_before_a_byte_is_copied(tmp_path: Path) -> None:
    url = f"{tmp_path}/weights"
    with pytest.raises(CapacityError, match=r"3 versions of 4503\d+ bytes .* bytes are free"):
        publish(sender(url), [("w", torch.zeros(1).expand(1 << 50))], V1)
    assert names_below(url) == ["paceline-weights.json"]


# ---- C25, C08, order ------------------------------------------------------------------------------------------------


def test_c25_nonfinite_weights_never_push_out_a_good_version(url: str) -> None:
    made = sender(url, shard_bytes=30)
    publish(made, weights(1.0), V1)
    second = publish(made, weights(2.0), V2)
    before = names_below(url)
    bad = dict(weights(3.0))
    bad["norm"][2] = float("nan")
    with pytest.raises(NonFiniteWeights, match="'norm': 1;"):
        publish(made, list(bad.items()), V3)
    assert names_below(url) == before
    assert latest(url) == second
    assert publish(made, weights(3.0), V3).version == V3


def test_c25_all_bad_tensors_are_named_whatever_shard_they_are_in(url: str) -> None:
    named = [(f"t{index}", torch.full((100,), float("inf") if index % 2 else 1.0)) for index in range(4)]
    with pytest.raises(NonFiniteWeights, match="'t1': 100, 't3': 100"):
        publish(sender(url, shard_bytes=400), named, V1)


def test_a_version_does_not_go_backwards_over_restarts(url: str) -> None:
    made = sender(url)
    publish(made, weights(), V2)
    made.close()
    again = sender(url)
    for version in (V1, V2):
        with pytest.raises(VersionError, match=r"cannot follow version 1\.2"):
            publish(again, weights(), version)
    assert publish(again, weights(), V3).version == V3


def test_a_directory_of_other_things_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "1.5").mkdir()
    (tmp_path / "1.5/thesis.txt").write_text("precious", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not empty and holds no weight versions"):
        sender(str(tmp_path))
    assert (tmp_path / "1.5/thesis.txt").read_text(encoding="utf-8") == "precious"


@pytest.mark.parametrize("stamp", [b"{}", b'{"format":"other"}', b"\x00"])
def test_a_foreign_stamp_is_refused(tmp_path: Path, stamp: bytes) -> None:
    (tmp_path / "paceline-weights.json").write_bytes(stamp)
    with pytest.raises(ConfigError, match="belongs to something else"):
        sender(str(tmp_path))


@pytest.mark.parametrize("url", ["nothing://x/y", "/proc/weights", "http://localhost:1/x"])
def test_a_place_that_cannot_be_written_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError, match=r"\S"):
        sender(url)
