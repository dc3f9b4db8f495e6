"""Imports every module that the base install promises, and says what must not have come along.

Run by `check_base_install.sh` in an environment that holds the base alone; imports nothing but the package under test.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys

# The weight path: usable under somebody else's trainer or inference server.
LIGHT = ("core",)
WEIGHT_PATH = ("weights", "algo", "store", "checkpoint_engine", "sync", "testing")
# What runs inside vLLM, and what pushes weights to it.
VLLM = ("engine.vllm_worker", "engine.vllm_model", "runtime.vllm_plugin", "runtime.vllm_push")
TRAINING_ONLY = ("ray", "transformers")


def modules_of(room: str) -> list[str]:
    """Names of every module in `paceline.<room>`, the package itself first; imports each package on the way."""
    package = importlib.import_module(f"paceline.{room}")
    inner = pkgutil.walk_packages(package.__path__, prefix=f"{package.__name__}.")
    return [package.__name__, *(module.name for module in inner)]


def import_rooms(rooms: tuple[str, ...]) -> int:
    """Import every module of `rooms` and return how many there are."""
    names = [name for room in rooms for name in modules_of(room)]
    for name in names:
        importlib.import_module(name)
    return len(names)


def refuse_loaded(names: tuple[str, ...], stage: str) -> None:
    """Exit with one line if any library of `names` has been imported."""
    loaded = [name for name in names if name in sys.modules]
    if loaded:
        sys.exit(f"base install: {stage} imported {', '.join(loaded)}")


def main() -> None:
    present = [name for name in TRAINING_ONLY if importlib.util.find_spec(name) is not None]
    if present:
        sys.exit(f"base install: {', '.join(present)} got installed with the base")
    importlib.import_module("paceline")
    light = import_rooms(LIGHT)
    importlib.import_module("paceline.message_queue")
    refuse_loaded(("torch", *TRAINING_ONLY), "the core")
    heavy = import_rooms(WEIGHT_PATH) + len(VLLM)
    for name in VLLM:
        importlib.import_module(f"paceline.{name}")
    refuse_loaded(TRAINING_ONLY, "the weight path")
    print(f"base install: {light + heavy + 1} modules import without {' and '.join(TRAINING_ONLY)}")


if __name__ == "__main__":
    main()
