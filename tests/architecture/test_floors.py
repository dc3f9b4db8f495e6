"""Floors: a room imports rooms on lower floors only, and each heavy library has the rooms that may name it."""

from __future__ import annotations

import sys

import pytest

from tests.architecture.source_tree import PACKAGE, Import, Source, imports, sources

FLOORS = {
    "core": 0,
    "weights": 1,
    "algo": 1,
    "task": 1,
    "store": 2,
    "checkpoint_engine": 3,
    "engine": 3,
    "backend": 3,
    "reward": 3,
    "observability": 3,
    "tokenizer": 3,
    "dataset": 3,
    "sync": 4,
    "rollout": 4,
    "train": 4,
    "message_queue": 4,
    "runtime": 5,
    "testing": 5,
    "cli": 6,
}
ADAPTERS = 3
LOOPS = 4

# A library and the places that may import it: a room ("engine") or a module ("runtime.ray_runtime").
ONLY_IN: dict[str, tuple[str, ...]] = {
    "ray": ("runtime.ray_runtime",),
    "transformers": ("engine", "backend"),
    "vllm": ("engine", "runtime.vllm_plugin"),
}
# Processes of these stay light: none of them names torch, not even inside a function. (The core's list is below.)
TORCH_FREE = (
    "message_queue",
    "sync.parameter_synchronizer",
    "sync.checkpoint_engine_manager",
    "rollout.rollouter",
    "rollout.load_balancer",
    "rollout.prompt_dataset",
    "observability",
)
CORE_MAY_IMPORT = (*sys.stdlib_module_names, PACKAGE, "pydantic", "msgspec")
# A loop gets its time from the Clock port and its CPU work done by the Work port.
LOOPS_MAY_NOT_IMPORT = ("time", "concurrent", "multiprocessing")


def floor_violations(source: Source) -> list[str]:
    """What `source` imports although its floor forbids it, one line each."""
    found = [reason for imported in imports(source) for reason in _judge(source, imported)]
    if source.room and source.room not in FLOORS:
        found.append(f"{source.path}: the room {source.room!r} has no floor")
    return found


def _judge(source: Source, imported: Import) -> list[str]:
    place = f"{source.path}:{imported.line}"
    if imported.top == PACKAGE:
        return [f"{place}: {reason}" for room in _rooms_of(imported) for reason in _judge_room(source.room, room)]
    inner = source.module.partition(".")[2]
    reasons: list[str] = []
    if imported.top in ONLY_IN and not _is_within(inner, ONLY_IN[imported.top]):
        reasons.append(f"{place}: {imported.top} may be imported only by {list(ONLY_IN[imported.top])}")
    if imported.top == "torch" and _is_within(inner, TORCH_FREE):
        reasons.append(f"{place}: {inner} must not import torch")
    typed_only = inner in ("core.ports", "core.weight_ports") and imported.top == "torch"  # for types; never loaded
    if source.room == "core" and imported.top not in CORE_MAY_IMPORT and not typed_only:
        reasons.append(f"{place}: core must not import {imported.top}")
    if FLOORS.get(source.room) == LOOPS and imported.top in LOOPS_MAY_NOT_IMPORT:
        reasons.append(f"{place}: a loop must not import {imported.top}")
    return reasons


def _rooms_of(imported: Import) -> list[str]:
    """Rooms that an import of the package reaches; a name that is no room comes back as ""."""
    parts = imported.module.split(".")
    if len(parts) > 1:
        return [parts[1]]
    return [name if name in FLOORS else "" for name in imported.names or ("",)]


def _judge_room(own: str, other: str) -> list[str]:
    if own in ("", other):
        return []
    if other == "":
        return ["a room imports modules, not the package's public names"]
    if own not in FLOORS or other not in FLOORS:
        return [f"the floor of {own!r} or {other!r} is not known"]
    if FLOORS[own] == LOOPS and FLOORS[other] == ADAPTERS:
        return [f"the loop {own} meets {other} only through core/ports.py"]
    if FLOORS[other] >= FLOORS[own]:
        return [f"{own} (floor {FLOORS[own]}) must not import {other} (floor {FLOORS[other]})"]
    return []


def _is_within(inner: str, places: tuple[str, ...]) -> bool:
    return any(inner == place or inner.startswith(f"{place}.") for place in places)


def test_every_import_respects_the_floors() -> None:
    violations = [line for source in sources(PACKAGE) for line in floor_violations(source)]
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize(
    ("path", "text", "reason"),
    [
        ("store/arena.py", "from paceline.sync.weight_receiver import x", "store (floor 2) must not import sync"),
        ("weights/delta.py", "import paceline.algo.loss", "weights (floor 1) must not import algo"),
        ("train/trainer.py", "from paceline import rollout", "train (floor 4) must not import rollout"),
        ("train/trainer.py", "from paceline import MessageQueue", "not the package's public names"),
        ("rollout/replica.py", "def f():\n    from paceline.engine import x", "only through core/ports.py"),
        ("core/sample.py", "if TYPE_CHECKING:\n    import torch", "core must not import torch"),
        ("core/sample.py", "import numpy as np", "core must not import numpy"),
        ("sync/a.py", "from ..train import trainer", "sync (floor 4) must not import train"),
        ("store/__init__.py", "from ..sync import a", "store (floor 2) must not import sync"),
        ("message_queue.py", "import paceline.sync", "message_queue (floor 4) must not import sync"),
        ("message_queue.py", "import torch.nn", "message_queue must not import torch"),
        ("observability/log.py", "import torch", "observability.log must not import torch"),
        ("runtime/registry.py", 'import_module("paceline.cli.main")', "runtime (floor 5) must not import cli"),
        ("runtime/registry.py", "import ray", "ray may be imported only by"),
        ("reward/score.py", "from transformers import AutoTokenizer", "transformers may be imported only by"),
        ("rollout/a.py", "import vllm", "vllm may be imported only by"),
        ("sync/a.py", "import time", "a loop must not import time"),
        ("extra/a.py", "", "'extra' has no floor"),
    ],
)
def test_a_wrong_import_is_refused(path: str, text: str, reason: str) -> None:
    violations = floor_violations(Source(f"{PACKAGE}/{path}", text))
    assert len(violations) == 1
    assert reason in violations[0]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("store/arena.py", "import torch\nfrom paceline.core.errors import StoreError\nfrom paceline import weights"),
        ("sync/weight_receiver.py", "from paceline.store.weight_store import WeightStore\nfrom paceline.sync import a"),
        ("runtime/ray_runtime.py", "import ray"),
        ("engine/embedded_engine.py", "import transformers"),
        ("testing/fakes.py", "from paceline.rollout.rollouter import FullyAsyncRollouter"),
        ("__init__.py", 'import_module("paceline.sync.parameter_synchronizer")'),
    ],
)
def test_a_right_import_passes(path: str, text: str) -> None:
    assert floor_violations(Source(f"{PACKAGE}/{path}", text)) == []
