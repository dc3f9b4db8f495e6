"""Roots to try the filesystem engine on, and both ends of it with short options."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import fsspec
import msgspec
import torch
import xxhash

from paceline.checkpoint_engine.filesystem import FilesystemReceiver, FilesystemSender
from paceline.checkpoint_engine.filesystem_format import Marker
from paceline.checkpoint_engine.filesystem_storage import FORMAT
from paceline.core.ports import Clock
from paceline.core.version import Version
from paceline.runtime.system import SystemClock

V1, V2, V3, V4, V5 = (Version(1, n).packed for n in range(1, 6))


class HookedClock:
    """A clock that stands still but for `at`, and calls `hook` at its `after`-th reading."""

    def __init__(self, hook: Callable[[], None] = lambda: None, after: int = 0) -> None:
        self.at = 0.0
        self._hook = hook
        self._after = after
        self._readings = 0

    def now(self) -> float:
        self._readings += 1
        if self._readings == self._after:
            self._hook()
        return self.at

    def wall(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        self.at += seconds


def sender(
    url: str,
    keep_versions: int = 2,
    keep_seconds: float = 0,
    shard_bytes: int = 1 << 20,
    clock: Clock | None = None,
) -> FilesystemSender:
    return FilesystemSender(
        url=url,
        keep_versions=keep_versions,
        keep_seconds=keep_seconds,
        shard_bytes=shard_bytes,
        dtype=None,
        nonfinite="error",
        threads=1,
        clock=clock or SystemClock(),
    )


def receiver(
    url: str, clock: Clock | None = None, verify: Literal["full", "off"] = "full", threads: int = 1
) -> FilesystemReceiver:
    return FilesystemReceiver(
        url=url,
        holder="replica-0",
        verify=verify,
        deadline_seconds=60,
        clock=clock or SystemClock(),
        threads=threads,
    )


def object_root() -> str:
    """A fresh root on an fsspec file system that is no local one."""
    return f"memory://{secrets.token_hex(8)}/weights"


def weights(value: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    embed = torch.full((3, 5), value, dtype=torch.bfloat16)
    return [
        ("embed", embed),
        ("norm", torch.full((7,), value)),
        ("step", torch.tensor(3)),
        ("head", embed),
        ("mask", torch.tensor([True, False, True])),
    ]


def rewrite(version_directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest as a forger would: the marker is made to fit it again."""
    tree = msgspec.json.decode((version_directory / "manifest.json").read_bytes())
    change(tree)
    sign(version_directory, msgspec.json.encode(tree))


def sign(version_directory: Path, manifest: bytes) -> None:
    (version_directory / "manifest.json").write_bytes(manifest)
    marker = Marker(FORMAT, len(manifest), xxhash.xxh3_128_hexdigest(manifest))
    (version_directory / "COMPLETE").write_bytes(msgspec.json.encode(marker))


def names_below(url: str) -> list[str]:
    """All files below a root, relative to it."""
    filesystem, path = fsspec.core.url_to_fs(url)
    filesystem.invalidate_cache()
    return sorted(name.split("weights/", 1)[1] for name in filesystem.find(path))
