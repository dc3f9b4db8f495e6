"""The plan of slots over vLLM's own model and loader: fused, sharded and padded parameters, before a CPU packs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.vllm.stock_server import free_port

PATIENCE_SECONDS = 240.0
FEWEST_GROUPS = 10  # embeddings, norms, and four linear layers of each of two blocks


def plans(size: int) -> list[dict[str, Any]]:
    """What each of so many workers says."""
    port = free_port()
    quiet = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.unpacked_model", str(rank), str(size), str(port)],
            stdout=subprocess.PIPE,
            env={**os.environ, **quiet},
        )
        for rank in range(size)
    ]
    try:
        said = [worker.communicate(timeout=PATIENCE_SECONDS)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0] * size
    return [json.loads(lines.splitlines()[-1]) for lines in said]


@pytest.mark.parametrize("size", [1, 2])
def test_written_elements_give_what_vllm_loads(size: int) -> None:
    for plan in plans(size):
        assert plan["proved"], "every element is where the plan says"
        assert plan["groups"] >= FEWEST_GROUPS
        assert plan["written"] == plan["differ"] > 1000
        assert plan["left"] == 0
