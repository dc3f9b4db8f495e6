"""A whole run on a cluster of two nodes: the trainer and all else on one, the replicas on the other.

python -m tests.e2e.two_node_run DIRECTORY RESULT_FILE
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from paceline.core.config import build_config
from paceline.runtime.run_directory import create_run
from paceline.runtime.stop_signal import StopSignal
from paceline.runtime.task_runner import FullyAsyncTaskRunner
from tests.e2e.two_nodes import TwoNodes, run

REPLICAS = 2


def train(nodes: TwoNodes) -> dict[str, Any]:
    """A short training over `ray_object`; the summary, and what the second node's store has created meanwhile."""
    from paceline.runtime.ray_runtime import RayRuntime

    directory = Path(nodes.nodes["first"].get_session_dir_path()).parents[1]
    config = build_config(
        {
            "checkpoint_engine": {"backend": "ray_object"},
            "rollout": {"num_replicas": REPLICAS, "total_rollout_steps": 640},
            "data": {"val_size": 100},
            "trainer": {"default_local_dir": str(directory / "runs"), "logger": []},
        }
    )
    spec = create_run(config)
    with StopSignal() as stop:
        runtime = RayRuntime(spec, stop, address=nodes.cluster.address)
        runner = FullyAsyncTaskRunner(spec, runtime, [], stop=stop, command_wall=time.time())
        asyncio.run(runner.run())
        created = nodes.store("second").cumulative_created_bytes
        runtime.stop(10.0)
        runner.sum_up()
    events = [json.loads(line) for line in spec.events_path.read_bytes().splitlines()]
    return {
        "summary": json.loads((Path(spec.run_dir) / "summary.json").read_bytes()),
        "captured_bytes": sum(event["bytes"] for event in events if event["kind"] == "sync.captured"),
        "created_on_second": created,
        "confirmed": sum(event["kind"] == "sync.confirmed" for event in events),
    }


if __name__ == "__main__":
    run(train, Path(sys.argv[1]), Path(sys.argv[2]), store_bytes=256 << 20)
