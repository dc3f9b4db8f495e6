"""The checkpoint engines under contract: both ends of each. A new engine adds its link here."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import torch

from paceline.checkpoint_engine.in_process import InProcessExchange, InProcessReceiver, InProcessSender
from paceline.checkpoint_engine.shared_memory import SharedMemoryReceiver, SharedMemorySender
from paceline.core.manifest import WeightManifest
from paceline.core.ports import WeightReceiver, WeightSender

Named = list[tuple[str, torch.Tensor]]


class Link(Protocol):
    """Both ends of one engine, and a way to damage what lies between them. Add an engine: add its link to `LINKS`."""

    def sender(
        self,
        arenas: int = 2,
        dtype: str | None = None,
        nonfinite: Literal["error", "off"] = "error",
        keep: tuple[str, ...] = (),
    ) -> WeightSender: ...

    def receiver(self, holder: str = "replica-0", verify: Literal["full", "off"] = "full") -> WeightReceiver: ...

    def flip(self, manifest: WeightManifest, byte: int, bit: int) -> None:
        """Flip one bit of the published bytes."""
        ...

    def close(self) -> None: ...


class SharedMemoryLink:
    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._senders: list[SharedMemorySender] = []

    def sender(
        self,
        arenas: int = 2,
        dtype: str | None = None,
        nonfinite: Literal["error", "off"] = "error",
        keep: tuple[str, ...] = (),
    ) -> WeightSender:
        made = SharedMemorySender(
            directory=self._directory.name, arenas=arenas, dtype=dtype, nonfinite=nonfinite, threads=2, keep=keep
        )
        self._senders.append(made)
        return made

    def receiver(self, holder: str = "replica-0", verify: Literal["full", "off"] = "full") -> WeightReceiver:
        return SharedMemoryReceiver(holder=holder, verify=verify, deadline_seconds=10)

    def flip(self, manifest: WeightManifest, byte: int, bit: int) -> None:
        store = self._senders[-1]._store  # noqa: SLF001
        assert store is not None
        arena = next(arena for arena in store._arenas if arena.arena_id == manifest.arena_id)  # noqa: SLF001
        assert arena.begin_write()
        arena.array[byte] ^= 1 << bit
        arena.end_write(manifest.version)

    def close(self) -> None:
        for sender in self._senders:
            sender.close()
        assert list(Path(self._directory.name).iterdir()) == []
        self._directory.cleanup()


class InProcessLink:
    def __init__(self) -> None:
        self._exchange = InProcessExchange()

    def sender(
        self,
        arenas: int = 2,
        dtype: str | None = None,
        nonfinite: Literal["error", "off"] = "error",
        keep: tuple[str, ...] = (),
    ) -> WeightSender:
        return InProcessSender(self._exchange, arenas=arenas, dtype=dtype, nonfinite=nonfinite, keep=keep)

    def receiver(self, holder: str = "replica-0", verify: Literal["full", "off"] = "full") -> WeightReceiver:
        return InProcessReceiver(self._exchange, holder=holder, verify=verify)

    def flip(self, manifest: WeightManifest, byte: int, bit: int) -> None:
        self._exchange.arenas[manifest.arena_id].buffer[byte] ^= 1 << bit

    def close(self) -> None:
        self._exchange.arenas.clear()


LINKS: dict[str, Callable[[], Link]] = {"shared_memory": SharedMemoryLink, "in_process": InProcessLink}
