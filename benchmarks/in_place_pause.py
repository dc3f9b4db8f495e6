"""How long generation stands still for a new version: pointers, a delta in place, all bytes copied.

    python benchmarks/in_place_pause.py [--gib 1] [--changed 0.01] [--rounds 7] [--threads 1] [--json FILE]

One process: a sender over shared memory and three replicas' transactions, each over an engine of its own kind, take the
same versions in turns. The pause is `WeightTransaction.swap`, which is what a replica does between two decode steps;
beside it stand a plain copy of the same bytes, the move alone, and the proof of an engine's memory that follows a
change in place while generation goes on. Medians over the rounds; every replica's digest is compared at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from paceline.checkpoint_engine.shared_memory import SharedMemoryReceiver, SharedMemorySender
from paceline.core.commands import StageCommand, SwapCommand
from paceline.core.manifest import WeightManifest
from paceline.core.version import Version
from paceline.runtime.system import SystemClock
from paceline.sync.weight_transaction import WeightTransaction
from paceline.testing.publication import publish
from paceline.testing.recording import RecordingBoard
from paceline.testing.weight_memory import OwnedWeights, PointedWeights, WeightMemory
from paceline.weights.digest import digest_tensors

TENSOR_BYTES = 32 << 20


class StillEngine:
    """Holds weights and generates nothing: as much of an engine as a swap needs."""

    def __init__(self, memory: WeightMemory, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self._memory = memory
        self._shapes = shapes
        self.version: int | None = None

    @property
    def apply(self) -> Literal["mapped", "copied"]:
        """That of the memory."""
        return self._memory.apply

    def expected_tensors(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """As sent."""
        return self._shapes

    def expected_ties(self) -> Sequence[tuple[str, str]]:
        """None."""
        return ()

    def bind(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Point at these or copy them."""
        self._memory.put(tensors)
        self.version = version

    def served_tensors(self) -> Mapping[str, torch.Tensor]:
        """What is held."""
        return self._memory.tensors

    def unbind(self) -> None:
        """Hold nothing."""
        self._memory.clear()


class PatchableStillEngine(StillEngine):
    """Lets its memory be changed in place."""

    def patched(self, version: int) -> None:
        """It was."""
        self.version = version


class Replica:
    """One transaction; `take` stages a version and returns the seconds of its swap and of the proof after it."""

    def __init__(self, name: str, engine: StillEngine, threads: int) -> None:
        self.engine = engine
        self._clock = SystemClock()
        self._transaction = WeightTransaction(
            replica_id=name,
            life=1,
            receiver=SharedMemoryReceiver(holder=name, threads=threads),
            board=RecordingBoard(),
            clock=self._clock,
        )

    def take(self, manifest: WeightManifest) -> tuple[float, float]:
        engine, deadline = self.engine, self._clock.wall() + 600
        stage = StageCommand(manifest=manifest, sync_id=0, deadline_wall=deadline)
        self._transaction.stage(stage, engine)  # type: ignore[arg-type] # an engine that only holds weights
        swap = SwapCommand(version=manifest.version, sync_id=0, deadline_wall=deadline)
        began = time.perf_counter()
        previous = self._transaction.swap(swap, engine)  # type: ignore[arg-type]
        swapped = time.perf_counter()
        self._transaction.audit(engine)  # type: ignore[arg-type]
        proved = time.perf_counter()
        if previous is not None:
            previous.release()
        return swapped - began, proved - swapped

    def close(self) -> None:
        """The engine lets go first: a lease lasts as long as anything refers to its bytes."""
        self.engine.unbind()
        self._transaction.close()


def make_weights(gib: float) -> dict[str, torch.Tensor]:
    """bf16 matrices of 32 MiB."""
    draw = torch.Generator().manual_seed(0)
    count = max(1, round(gib * (1 << 30) / TENSOR_BYTES))
    return {f"layers.{i:03d}": (torch.randn(4096, 4096, generator=draw) * 0.02).bfloat16() for i in range(count)}


def change(weights: Mapping[str, torch.Tensor], share: float, round_number: int) -> None:
    """Move this share of the elements by one to three places on the number line; positions differ per tensor."""
    draw = np.random.default_rng(round_number)
    for tensor in weights.values():
        bits = tensor.view(torch.int16).view(-1).numpy()
        places = draw.integers(0, len(bits), round(share * len(bits)))
        bits[places] ^= draw.integers(1, 4, len(places)).astype(np.int16)


def measure(options: argparse.Namespace) -> dict[str, float | int]:
    """Medians in seconds."""
    torch.set_num_threads(options.threads)
    weights = make_weights(options.gib)
    shapes = {name: ("bfloat16", tuple(tensor.shape)) for name, tensor in weights.items()}
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        sender = SharedMemorySender(directory=directory, arenas=2, threads=2, delta="delta")
        replicas = {
            "mapped": Replica("mapped", StillEngine(PointedWeights(), shapes), options.threads),
            "copied": Replica("copied", StillEngine(OwnedWeights(), shapes), options.threads),
            "in place": Replica("in-place", PatchableStillEngine(OwnedWeights(), shapes), options.threads),
        }
        manifest = publish(sender, weights.items(), Version(1, 0).packed)
        for replica in replicas.values():
            replica.take(manifest)
        memory = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
        for number in range(1, options.rounds + 2):
            change(weights, options.changed, number)
            manifest = publish(sender, weights.items(), Version(1, number).packed, manifest.version)
            seconds = {}
            for name, replica in replicas.items():
                seconds[name], seconds[f"proof after {name}"] = replica.take(manifest)
            began = time.perf_counter()
            for name, tensor in weights.items():
                memory[name].copy_(tensor)
            seconds["plain copy"] = time.perf_counter() - began
            if number > 1:  # the first round compiles and touches
                for name, value in seconds.items():
                    figures.setdefault(name, []).append(value)
        for name, replica in replicas.items():
            if digest_tensors(replica.engine.served_tensors(), {}) != manifest.digest:
                raise SystemExit(f"{name} does not serve what was published")
            replica.close()
        sender.close()
    medians: dict[str, float | int] = {name: statistics.median(values) for name, values in figures.items()}
    medians["delta bytes"] = 0 if manifest.delta is None else manifest.delta.nbytes
    medians["full bytes"] = manifest.total_bytes
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--changed", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="of each replica: copying, moving, proving")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    medians = measure(options)
    for name, value in medians.items():
        shown = f"{value:,}" if name.endswith("bytes") else f"{value * 1000:.2f} ms"
        print(f"{name:<22} {shown:>16}")
    print(f"in place / copied      {medians['in place'] / medians['copied']:>16.2f}")
    print(f"in place / plain copy  {medians['in place'] / medians['plain copy']:>16.2f}")
    if options.json:
        options.json.write_text(json.dumps(medians, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
