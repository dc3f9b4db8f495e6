"""A running Ray cluster of one node or more, as a process of its own: python -m tests.e2e.head_node DIRECTORY NODES

Writes its address to DIRECTORY/address and ends when its standard input does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_SECONDS = 120.0
STOP_SECONDS = 60.0
STORE_BYTES = 200 << 20


@contextmanager
def head_node(nodes: int = 1) -> Iterator[str]:
    """The address of the cluster; whoever joins it from this machine belongs to the first node."""
    # Short, since the paths of sockets may have 107 bytes only.
    with tempfile.TemporaryDirectory(prefix="h-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        command = [sys.executable, "-m", "tests.e2e.head_node", directory, str(nodes)]
        address = Path(directory, "address")
        # Ray leaves word of the cluster there, and not where it would be taken for one of this machine.
        environment = {**os.environ, "RAY_TMPDIR": directory}
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        ) as process:
            assert process.stdin is not None
            deadline = time.monotonic() + START_SECONDS
            try:
                while not (address.is_file() and address.read_text(encoding="utf-8")):
                    assert time.monotonic() < deadline, "the cluster does not start"
                    assert process.poll() is None, "the cluster died"
                    time.sleep(0.2)
                yield address.read_text(encoding="utf-8")
                assert process.poll() is None, "the cluster died"
            finally:
                process.stdin.close()
                process.wait(STOP_SECONDS)


def main(directory: Path, nodes: int) -> None:
    """Start the nodes and stay."""
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster()
    options = {"num_gpus": 0, "object_store_memory": STORE_BYTES, "temp_dir": str(directory / "ray")}
    cluster.add_node(num_cpus=4, include_dashboard=False, **options)
    for _ in range(1, nodes):
        cluster.add_node(num_cpus=4, **options)
    try:
        (directory / "address").write_text(cluster.address, encoding="utf-8")
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
