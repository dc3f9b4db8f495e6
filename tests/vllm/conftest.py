"""Tests against the real vLLM: they run in its own environment (`make test-vllm`) and are not collected elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.vllm.fleet import Fleet

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two engines of our own and a stock server, with a replica over each; started once for all tests."""
    directory: Path = tmp_path_factory.mktemp("fleet")
    fleet = Fleet(directory)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.stop()
