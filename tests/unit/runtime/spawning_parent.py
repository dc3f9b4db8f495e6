"""A process that starts one as vLLM starts its engine, says the child's pid, and then waits like it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys

from paceline.runtime.vllm_plugin import end_with_parent


def wait_for_work() -> None:
    """As vLLM's engine process: the plug-ins are loaded, twice, then it waits for work that never comes."""
    end_with_parent()
    end_with_parent()
    sys.stdout.write(f"{os.getpid()}\n")
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=wait_for_work).start()
    signal.pause()
