"""Any URL that fsspec knows: plain, cached, nested, and with the ways of a cloud; and readers that are elsewhere."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from paceline.checkpoint_engine.filesystem_follower import FilesystemFollower
from paceline.core.errors import ConfigError, SyncError, VersionError
from paceline.core.version import Version
from paceline.runtime.system import InlineWork
from paceline.testing.publication import publish
from tests.unit.checkpoint_engine.bucket_filesystem import BucketFileSystem
from tests.unit.checkpoint_engine.roots import V1, V2, V3, V4, HookedClock, receiver, sender, weights

ROOT = Path(__file__).parents[3]
URLS = {
    "path": "{directory}/weights",
    "file": "file://{directory}/weights",
    "local": "local://{directory}/weights",
    "memory": "memory://{name}/weights",
    "bucket": "bucket://{name}/weights",
    "below another": "dir::file://{directory}/weights",
    "below memory": "dir::memory://{name}/weights",
    "cached": "simplecache::memory://{name}/weights",
    "cached with a list": "filecache::memory://{name}/weights",
    "a cached disk": "simplecache::file://{directory}/weights",
    "a cached bucket": "simplecache::bucket://{name}/weights",
}
# How another machine may see a directory that one writes to as a disk.
SEEN_AS = ("{directory}/weights", "file://{directory}/weights", "simplecache::file://{directory}/weights")


@pytest.fixture(autouse=True)
def bucket() -> Iterator[type[BucketFileSystem]]:
    fsspec.register_implementation("bucket", BucketFileSystem, clobber=True)
    yield BucketFileSystem
    BucketFileSystem.objects.clear()
    BucketFileSystem.loses.clear()


@pytest.fixture(params=URLS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return URLS[request.param].format(directory=tmp_path, name=secrets.token_hex(8))


def test_versions_are_published_followed_removed_and_gone_on_with(url: str) -> None:
    made, replica = sender(url, shard_bytes=60), receiver(url)
    follower = FilesystemFollower(url, clock=HookedClock(), work=InlineWork())
    seen = []
    for number, version in enumerate((V1, V2, V3, V4), start=1):
        seen.append(publish(made, weights(float(number)), version))
        assert follower.latest() == seen[-1]
        staged = replica.stage(seen[-1])
        assert staged.digest == seen[-1].digest
        assert staged.tensors["norm"].tolist() == [float(number)] * 7
        staged.release()
    with pytest.raises(SyncError, match="is gone"):
        replica.stage(seen[1])
    assert replica.stage(seen[2]).digest == seen[2].digest
    made.close()
    later = sender(url)
    with pytest.raises(VersionError, match="cannot follow"):
        publish(later, weights(), V4)
    newest = publish(later, weights(7.0), Version(2, 0).packed)
    assert follower.latest() == newest
    assert replica.stage(newest).tensors["norm"].tolist() == [7.0] * 7
    later.close()


@pytest.mark.parametrize("kind", ["bucket", "below another", "below memory", "cached", "a cached disk"])
def test_a_root_of_other_things_is_refused_and_left_as_it_is(kind: str, tmp_path: Path) -> None:
    url = URLS[kind].format(directory=tmp_path, name=secrets.token_hex(8))
    filesystem, path = fsspec.core.url_to_fs(url)
    filesystem.makedirs(path, exist_ok=True)
    with filesystem.open(f"{path}/report.txt", "wb") as file:
        file.write(b"mine")
    with pytest.raises(ConfigError, match="is not empty"):
        sender(url)
    filesystem.invalidate_cache()
    assert [name.rpartition("/")[2] for name in filesystem.ls(path, detail=False)] == ["report.txt"]
    assert filesystem.cat_file(f"{path}/report.txt") == b"mine"


# ---- storages that cannot do it -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "nosuch://bucket/weights",
        "data:,weights",
        "zip://weights::{directory}/not_there.zip",
        "asyncwrapper::file://{directory}/weights",  # takes writes and drops them
    ],
)
def test_what_cannot_be_written_is_a_configuration_error_with_the_url(url: str, tmp_path: Path) -> None:
    url = url.format(directory=tmp_path)
    with pytest.raises(ConfigError) as caught:
        sender(url)
    assert url in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("lost", ["00001-of", "manifest.json", "COMPLETE"])
def test_a_write_that_was_not_kept_is_no_publication(bucket: type[BucketFileSystem], lost: str) -> None:
    url = URLS["bucket"].format(name=secrets.token_hex(8))
    made = sender(url, shard_bytes=60)
    first = publish(made, weights(1.0), V1)
    bucket.loses.append(lost)
    with pytest.raises(SyncError, match="which is not there"):
        publish(made, weights(2.0), V2)
    assert FilesystemFollower(url, clock=HookedClock(), work=InlineWork()).latest() == first
    bucket.loses.clear()
    second = publish(made, weights(2.0), V2)
    assert receiver(url).stage(second).tensors["norm"].tolist() == [2.0] * 7


# ---- a reader elsewhere ---------------------------------------------------------------------------------------------

# Knows the URL and nothing else of the run: no configuration, no manifest, no process of it.
ELSEWHERE = """
import asyncio, sys
from paceline.checkpoint_engine.filesystem import FilesystemReceiver
from paceline.checkpoint_engine.filesystem_follower import FilesystemFollower
from paceline.runtime.system import SystemClock, ThreadWork

async def main(url, clock, version=-1):
    follower = FilesystemFollower(url, clock=clock, work=ThreadWork("follow"), poll_seconds=0.02)
    replica = FilesystemReceiver(url=url, holder="elsewhere", clock=clock)
    print("waits", flush=True)
    for _ in range(3):
        manifest = await follower.wait_newer(version, deadline_seconds=60)
        staged, version = replica.stage(manifest), manifest.version
        print(version, staged.digest, staged.tensors["head"].sum().item(), flush=True)
        staged.release()

asyncio.run(main(sys.argv[1], SystemClock()))
"""


@pytest.mark.parametrize("seen_as", SEEN_AS)
def test_a_process_that_knows_only_the_url_follows_each_version(seen_as: str, tmp_path: Path) -> None:
    made = sender(f"{tmp_path}/weights", shard_bytes=60)
    reader = subprocess.Popen(
        [sys.executable, "-c", ELSEWHERE, seen_as.format(directory=tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]},
    )
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "waits\n"
        for number, version in enumerate((V1, V2, Version(2, 0).packed), start=1):
            published = publish(made, weights(float(number)), version)
            assert reader.stdout.readline() == f"{version} {published.digest} {15.0 * number}\n"
        assert reader.wait(timeout=30) == 0
    finally:
        reader.kill()
        reader.communicate(timeout=30)
        made.close()
