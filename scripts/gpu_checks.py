"""The checks of `gpu_smoke.sh`, each a line: `planes` (the delta codec on the device), `serving` (swaps under vLLM).

    python scripts/gpu_checks.py planes [--device cuda]
    python scripts/gpu_checks.py serving [--model DIRECTORY] [--dtype bfloat16]

They run on a CPU too, where they show nothing new. A check that fails ends with its reason and exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from functools import partial
from importlib import resources
from pathlib import Path

import torch

SYNCS = 4


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
    print(f"planes: {device} and CPU agree on {made.changed} changes of {base.numel()}; {1000 * seconds:.1f} ms")


async def check_serving(model: str, dtype: str) -> None:
    """Swaps under generation: proved, with equal checksums after a scatter and after a whole load."""
    from safetensors.torch import load_file

    from paceline.checkpoint_engine.shared_memory import SharedMemorySender
    from paceline.core.version import Version
    from paceline.engine.vllm_async import VllmEngine, VllmOptions
    from paceline.engine.vllm_commands import ReceiverSpec
    from paceline.engine.vllm_control import VllmWeights
    from paceline.runtime.system import SystemClock
    from paceline.testing.publication import publish

    clock = SystemClock()
    files = sorted(Path(model).glob("*.safetensors"))
    tensors = {name: t.to(getattr(torch, dtype)) for file in files for name, t in load_file(file).items()}
    with tempfile.TemporaryDirectory() as directory:
        sender = SharedMemorySender(directory=directory, arenas=4)
        engine = VllmEngine(
            VllmOptions(model=model, dtype=dtype, max_model_len=256, max_num_seqs=32),
            name="engine",
            clock=clock,
            make_weights=partial(VllmWeights, name="engine", receiver=ReceiverSpec("shared_memory"), clock=clock),
        )
        await engine.start()
        try:
            for n in range(SYNCS):
                manifest = publish(sender, tensors.items(), Version(1, n).packed)
                await engine.stage(manifest, clock.wall() + 120)
                began = clock.now()
                await engine.pause(clock.wall() + 60)
                await engine.load(manifest.version)
                await engine.confirm(manifest.version, manifest.digest)
                await engine.resume()
                print(f"swap {n}: {1000 * (clock.now() - began):.1f} ms, {manifest.total_bytes} bytes, proved")
                for name, tensor in tensors.items():
                    place = torch.rand(tensor.shape) < 0.005
                    tensors[name] = torch.where(place, tensor * 1.01, tensor)
        finally:
            await engine.close()
            sender.close()


def main() -> None:
    """Run one check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("check", choices=["planes", "serving"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default=str(Path(str(resources.files("paceline"))) / "assets/tiny_model"))
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    if arguments.check == "planes":
        check_planes(arguments.device)
    else:
        asyncio.run(check_serving(arguments.model, arguments.dtype))


if __name__ == "__main__":
    main()
