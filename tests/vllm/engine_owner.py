"""A process with a vLLM engine of its own, as a replica has one; says when it generates, then waits to be killed.

Everything is imported inside: vLLM's processes import this module too, and those on a CPU look through all that is
imported by then.
"""

from __future__ import annotations

import asyncio
import sys


async def main() -> None:
    """Start, then wait."""
    from functools import partial

    from paceline.engine.vllm_async import VllmEngine, VllmOptions
    from paceline.engine.vllm_commands import ReceiverSpec
    from paceline.engine.vllm_control import VllmWeights
    from paceline.runtime.system import SystemClock
    from tests.vllm.fleet import shipped_model

    clock = SystemClock()
    engine = VllmEngine(
        VllmOptions(model=shipped_model(), dtype="float32", max_model_len=128, max_num_seqs=4),
        name="engine",
        clock=clock,
        make_weights=partial(VllmWeights, name="engine", receiver=ReceiverSpec("shared_memory"), clock=clock),
    )
    await engine.start()
    assert await engine.weight_version() is None
    sys.stdout.write("started\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
