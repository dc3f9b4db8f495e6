"""A run's spec from dotted settings, in directories of the test."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.runtime.run_directory import create_run
from paceline.runtime.run_lock import RunLock
from paceline.runtime.spec import RunSpec
from tests.unit.config_keys.keys import config_with

MakeSpec = Callable[..., RunSpec]


@pytest.fixture
def make_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeSpec]:
    """`make_spec({"section.key": value})`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    with ExitStack() as ends:

        def make(settings: dict[str, object]) -> RunSpec:
            lock = RunLock()
            ends.callback(lock.release)
            return create_run(config_with(settings), lock)

        yield make
