"""The checks of `gpu_smoke.sh`; each prints rows of a table.

    python scripts/gpu_checks.py planes [--device cuda]                          the delta codec on the device
    python scripts/gpu_checks.py serving [--model DIRECTORY] [--dtype bfloat16]  swaps of a vLLM engine that generates
    python scripts/gpu_checks.py run --directory DIRECTORY                       what a run below it has come to

They run on a CPU too, where no element is written in place. A check that fails ends with its reason and exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from paceline.core.manifest import WeightManifest
    from paceline.engine.vllm_async import VllmEngine
    from paceline.engine.vllm_control import VllmWeights

SYNCS = 5
STREAMS = 8
LENGTH = 160
CHANGED = 0.005


def row(what: str, figure: str) -> None:
    """One row of the table."""
    print(f"| {what} | {figure} |", flush=True)


def check_planes(device: str) -> None:
    """Planes made on the device are those made on the CPU, number for number."""
    from paceline.weights.delta.number_line import bits_of, line_of
    from paceline.weights.delta.planes import planes_of
    from paceline.weights.delta.torch_planes import torch_planes

    generator = torch.Generator().manual_seed(0)
    base = torch.randn(4_000_000, generator=generator).to(torch.bfloat16)
    target = torch.where(torch.rand(base.shape, generator=generator) < 0.01, base * 1.01, base)
    there = base.to(device), target.to(device)
    torch_planes(*there, "small")
    began = time.perf_counter()
    made = torch_planes(*there, "small")
    seconds = time.perf_counter() - began
    right = planes_of(bits_of(base), bits_of(target), line_of(base.dtype), "small")
    same = made.edges == right.edges and all(
        (getattr(made, name) == getattr(right, name)).all() for name in ("totals", "counts", "gaps", "distances")
    )
    if not same:
        raise SystemExit(f"planes: those of {device} are not those of the CPU")
    row(
        f"planes of {made.changed:,} changes in {base.numel():,} elements, equal to a CPU's", f"{1000 * seconds:.1f} ms"
    )


class Swaps:
    """A vLLM engine, what publishes to it, and two ways to drive its weights: what differs, or everything."""

    def __init__(self, model: str, dtype: str, directory: str) -> None:
        from safetensors.torch import load_file

        from paceline.checkpoint_engine.shared_memory import SharedMemorySender
        from paceline.engine.vllm_async import VllmEngine, VllmOptions
        from paceline.runtime.system import SystemClock

        self.clock = SystemClock()
        files = sorted(Path(model).glob("*.safetensors"))
        self.tensors = {name: t.to(getattr(torch, dtype)) for file in files for name, t in load_file(file).items()}
        self.sender = SharedMemorySender(directory=directory, arenas=3)
        options = VllmOptions(model=model, dtype=dtype, max_model_len=256, max_num_seqs=32)
        self.engine = VllmEngine(options, name="engine", clock=self.clock, make_weights=self._make_weights)
        self.everything = self._driver(self.engine, "full")
        self.written = 0

    def _make_weights(self, calls: Any) -> VllmWeights:
        self.weights = self._driver(calls, "changed")
        return self.weights

    def _driver(self, calls: Any, extent: Any) -> VllmWeights:
        from paceline.engine.vllm_commands import ReceiverSpec
        from paceline.engine.vllm_control import VllmWeights

        spec = ReceiverSpec("shared_memory")
        return VllmWeights(calls, name="engine", receiver=spec, clock=self.clock, extent=extent)

    def change(self) -> None:
        """A step of training: few elements change."""
        for name, tensor in self.tensors.items():
            self.tensors[name] = torch.where(torch.rand(tensor.shape) < CHANGED, tensor * 1.01, tensor)

    async def swap(self, number: int) -> WeightManifest:
        """One version: staged beside generation, loaded and proved in the pause."""
        from paceline.core.version import Version
        from paceline.testing.publication import publish

        manifest = publish(self.sender, self.tensors.items(), Version(1, number).packed)
        await self.engine.stage(manifest, self.clock.wall() + 60)
        began = self.clock.now()
        await self.engine.pause(self.clock.wall() + 60)
        await self.load(self.weights, manifest)
        await self.engine.resume()
        seconds = self.clock.now() - began
        wrote = await self.weights.wrote_in_place(manifest.version)
        self.written += wrote
        how = "elements written in place" if wrote else "loaded by layers" if number else "loaded whole"
        row(f"swap {number}, {how}, proved: pause", f"{1000 * seconds:.0f} ms")
        return manifest

    async def load(self, weights: VllmWeights, manifest: WeightManifest) -> None:
        """Load and prove."""
        await weights.load(manifest.version)
        await weights.confirm(manifest.version, manifest.digest)


@contextmanager
def swaps_of(model: str, dtype: str) -> Iterator[Swaps]:
    """Everything for `check_serving`; the sender ends with it."""
    with tempfile.TemporaryDirectory() as directory:
        swaps = Swaps(model, dtype, directory)
        try:
            yield swaps
        finally:
            swaps.sender.close()


async def generate(engine: VllmEngine, made: list[int]) -> None:
    """Keep one request going; counts tokens until it is cancelled."""
    from paceline.core.sample import GenerationRequest, SamplingParams

    params = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=LENGTH, stop_token_ids=())
    while True:
        async for batch in engine.generate(GenerationRequest("request", [5, 6, 7, 8], params)):
            made[0] += len(batch.token_ids)


async def check_serving(model: str, dtype: str) -> None:
    """Swaps under generation: proved, with equal checksums after elements were written and after a whole load."""
    with swaps_of(model, dtype) as swaps:
        await swaps.engine.start()
        made, asking = [0], list[asyncio.Task[None]]()
        try:
            manifest = await swaps.swap(0)
            asking = [asyncio.ensure_future(generate(swaps.engine, made)) for _ in range(STREAMS)]
            for number in range(1, SYNCS):
                await asyncio.sleep(1.0)
                swaps.change()
                manifest = await swaps.swap(number)
            await asyncio.sleep(1.0)
            await swaps.engine.pause(swaps.clock.wall() + 60)
            sums = await swaps.engine.checksums()
            began = swaps.clock.now()
            await swaps.load(swaps.everything, manifest)
            row("the last version once more, loaded whole", f"{1000 * (swaps.clock.now() - began):.0f} ms")
            _compare(sums, await swaps.engine.checksums())
            await swaps.engine.resume()
        finally:
            for task in asking:
                task.cancel()
            failed = [e for e in await asyncio.gather(*asking, return_exceptions=True) if isinstance(e, Exception)]
            await swaps.engine.close()
    if failed:
        raise SystemExit(f"serving: a request failed: {failed[0]}")
    row(f"tokens of {STREAMS} requests meanwhile", f"{made[0]:,}")
    if torch.cuda.is_available() and not swaps.written:
        raise SystemExit("serving: no element was written in place: this model's layers have no plan on this GPU")


def _compare(after_writing: Mapping[str, str], after_loading: Mapping[str, str]) -> None:
    unlike = sorted(name for name in after_loading if after_writing.get(name) != after_loading[name])
    if unlike:
        raise SystemExit(f"serving: other checksums after a whole load: {unlike[:8]}")
    row("vLLM's checksums, equal after either", f"{len(after_loading)} parameters")


def check_run(directory: Path) -> None:
    """A run that completed, all of whose syncs were verified."""
    summary = json.loads(next(directory.glob("**/summary.json")).read_text(encoding="utf-8"))
    syncs = summary["syncs"]
    if summary["outcome"] != "completed" or syncs["count"] != syncs["verified_count"]:
        raise SystemExit(f"run: {summary['outcome']}, {syncs['verified_count']} of {syncs['count']} syncs verified")
    accuracy = f"{summary['val_accuracy_first']:.3f} to {summary['val_accuracy_last']:.3f}"
    row(f"run of {summary['steps']} updates, {syncs['count']} syncs, all verified: validation accuracy", accuracy)
    row("the run's training", f"{summary['train_seconds']:.0f} s")


def main() -> None:
    """Run one check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("check", choices=["planes", "serving", "run"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default=str(Path(str(resources.files("paceline"))) / "assets/tiny_model"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--directory", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    if arguments.check == "planes":
        check_planes(arguments.device)
    elif arguments.check == "serving":
        asyncio.run(check_serving(arguments.model, arguments.dtype))
    else:
        check_run(arguments.directory)


if __name__ == "__main__":
    main()
