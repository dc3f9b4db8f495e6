"""A stock vLLM OpenAI server as a process, started as its users start it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

BLOCK = 32


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class StockServer:
    """Start, kill, start again on the same port. Its output goes to `directory`."""

    def __init__(self, model: str, directory: Path) -> None:
        self._model = model
        self._directory = directory
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns at once; it answers after half a minute."""
        environment = {
            **os.environ,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",  # several servers share few cores
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and worker in one process
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        options = [
            *("--model", self._model, "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"),
            *("--max-model-len", "512", "--max-num-seqs", "32", "--enforce-eager", "--block-size", str(BLOCK)),
            *("--logprobs-mode", "processed_logprobs", "--weight-transfer-config", '{"backend": "paceline"}'),
        ]
        with (self._directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """SIGKILL, to it and to the processes that it has started."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=30)
            self._process = None
