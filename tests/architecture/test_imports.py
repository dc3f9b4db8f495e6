"""What an import drags in, seen from outside: a fresh interpreter imports modules and tells what got loaded."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.architecture.source_tree import PACKAGE, ROOT, sources

TRAINING = {"ray", "transformers", "vllm"}
REPORT = "import importlib, json, sys; [importlib.import_module(n) for n in json.loads(sys.argv[1])]; "
REPORT += "print(json.dumps(sorted({n.split('.')[0] for n in sys.modules})))"


def loaded_after(*modules: str) -> set[str]:
    """Top-level names in `sys.modules` of a fresh interpreter that has imported `modules`."""
    command = [sys.executable, "-c", REPORT, json.dumps(modules)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def modules_of(*rooms: str) -> list[str]:
    """Dotted names of every module in `rooms`."""
    return [source.module for source in sources(PACKAGE) if source.room in rooms]


def test_the_core_needs_neither_torch_nor_ray() -> None:
    modules = modules_of("core")
    assert modules
    assert not loaded_after(PACKAGE, *modules) & {"torch", "numpy", "numba", *TRAINING}


@pytest.mark.parametrize(
    "module",
    [
        "message_queue",
        "sync.parameter_synchronizer",
        "sync.checkpoint_engine_manager",
        "rollout.rollouter",
        "rollout.load_balancer",
        "rollout.prompt_dataset",
    ],
)
def test_light_processes_load_no_torch(module: str) -> None:
    assert not loaded_after(f"{PACKAGE}.{module}") & {"torch", *TRAINING}


def test_the_log_needs_no_torch() -> None:
    modules = modules_of("observability")
    assert modules
    assert not loaded_after(*modules) & {"torch", *TRAINING}


def test_the_weight_path_needs_no_training_library() -> None:
    modules = modules_of("weights", "algo", "store", "checkpoint_engine", "sync", "testing")
    assert modules
    assert not loaded_after(*modules) & TRAINING


def test_the_command_starts_light() -> None:
    assert not loaded_after(f"{PACKAGE}.cli.main") & {"torch", *TRAINING}


def test_a_loaded_library_is_seen() -> None:
    assert "numpy" in loaded_after("numpy")
    assert "numpy" not in loaded_after("json")
