"""Which cluster `ray.address` means, and refusals that come before anything is started."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.runtime.ray_address import CURRENT_CLUSTER, cluster_address
from paceline.runtime.ray_environment import prepare_environment, prepare_joining, variables_of_workers
from tests.unit.config_keys.keys import config_with


@pytest.fixture
def listening() -> Iterator[str]:
    """An address that something answers at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def silent() -> str:
    """An address that nobody answers at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture(autouse=True)
def own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RAY_ADDRESS", "RAY_TMPDIR", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def address_of(wanted: str | None) -> str | None:
    return cluster_address(config_with({"ray.address": wanted}))


def test_without_the_key_a_run_has_a_ray_of_its_own() -> None:
    assert address_of(None) is None


def test_an_address_that_answers_is_taken(listening: str) -> None:
    assert address_of(listening) == listening


def test_auto_is_what_ray_start_left_behind(listening: str, tmp_path: Path) -> None:
    file = tmp_path / CURRENT_CLUSTER
    file.parent.mkdir()
    file.write_text(listening, encoding="utf-8")
    assert address_of("auto") == listening


def test_auto_is_first_of_all_what_the_environment_says(listening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", listening)
    assert address_of("auto") == listening


def test_a_silent_address_is_refused(silent: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^ray\.address={silent}: no Ray cluster answers .*ray start --head"
    ) as found:
        address_of(silent)
    assert "\n" not in found.value.message


def test_auto_without_a_cluster_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^ray\.address=auto: no Ray cluster runs on this machine"):
        address_of("auto")


def test_only_a_ray_of_its_own_gets_a_secret_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {"RAY_AUTH_TOKEN": "theirs"}
    monkeypatch.setattr("os.environ", environment)
    prepare_joining(tmp_path)
    assert environment["RAY_AUTH_TOKEN"] == "theirs"
    assert "RAY_AUTH_MODE" not in environment
    environment["PACELINE_RUN_TOKEN"] = "mark"
    assert variables_of_workers(tmp_path)["PACELINE_RUN_TOKEN"] == "mark"
    prepare_environment(tmp_path)
    assert environment["RAY_AUTH_TOKEN"] != "theirs"
    assert environment["RAY_AUTH_MODE"] == "token"
