"""A reward function as it is called: loaded, checked, called again after a network error, its answer made a number.

Law: what a function does is its own affair; what leaves here is a finite score with finite metrics, or one line.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, RewardError
from paceline.core.sample import Score
from paceline.reward.function_spec import Call, FunctionSpec

LONGEST_LINE = 500
PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
# Clients of remote judges whose errors are no OSErrors.
NETWORK_LIBRARIES = ("aiohttp", "anthropic", "http", "httpcore", "httpx", "httpx2", "litellm", "openai", "urllib3")


class RewardFunction:
    """The function of a spec.

    Raises:
        ConfigError: its file cannot be loaded, has no such function, or the function does not take the arguments.
    """

    def __init__(self, spec: FunctionSpec) -> None:
        self._spec = spec
        self._function = _load(spec)
        self.is_async = inspect.iscoroutinefunction(self._function)

    def call(self, call: Call) -> Score:
        """Of a `def` function.

        Raises:
            RewardError: it failed, or gave no score.
        """
        for wait in self._waits():
            try:
                return as_score(self._function(**self._arguments(call)))
            except (Exception, SystemExit) as error:  # whatever a user's function raises becomes a line about it
                if wait is None or not is_network_error(error):
                    raise RewardError(one_line(error)) from error
                time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    async def call_async(self, call: Call) -> Score:
        """Of an `async def` function; see `call`."""
        import asyncio  # a def function does without, and its process starts in half the time

        for wait in self._waits():
            try:
                answer: Awaitable[Any] = self._function(**self._arguments(call))
                return as_score(await answer)
            except (Exception, SystemExit) as error:  # as above
                if wait is None or not is_network_error(error):
                    raise RewardError(one_line(error)) from error
                await asyncio.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def _arguments(self, call: Call) -> dict[str, Any]:
        return {name: getattr(call, name) for name in PARAMETERS} | self._spec.arguments

    def _waits(self) -> Iterator[float | None]:
        """What to wait after each attempt that fails; None after the last one."""
        for attempt in range(self._spec.attempts - 1):
            yield self._spec.wait_seconds * 2**attempt
        yield None


def _load(spec: FunctionSpec) -> Callable[..., Any]:
    where = spec.path or spec.module
    try:
        module = importlib.import_module(spec.module) if spec.path is None else _module_of(Path(spec.path))
    except FileNotFoundError as error:
        raise ConfigError(f"{where}: there is no such file") from error
    except (Exception, SystemExit) as error:  # a user's file may do anything when it is loaded
        raise ConfigError(f"{where}: cannot be loaded: {one_line(error)}") from error
    function: Callable[..., Any] | None = getattr(module, spec.name, None)
    if not callable(function):
        raise ConfigError(f"{where}: has no function {spec.name}")
    try:
        inspect.signature(function).bind(**dict.fromkeys(PARAMETERS), **spec.arguments)
    except TypeError as error:
        names = ", ".join([*PARAMETERS, *spec.arguments])
        raise ConfigError(f"{where}: {spec.name} is called with {names}: {error}") from error
    return function


def _module_of(path: Path) -> Any:
    """The file as a module; it finds what lies beside it."""
    sys.path.insert(0, str(path.parent))
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    if module_spec is None or module_spec.loader is None:
        raise ImportError("it is no Python file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[path.stem] = module
    module_spec.loader.exec_module(module)
    return module


def as_score(answer: object) -> Score:
    """What a function returned: a number, or a dict whose `score` is one and whose other numbers are metrics.

    Raises:
        RewardError: it is neither, or not finite.
    """
    if not isinstance(answer, dict):
        return Score(_score(answer))
    if "score" not in answer:
        raise RewardError(f"returned a dict without 'score' (it has {', '.join(map(str, answer)) or 'nothing'})")
    others = {str(name): _number(value) for name, value in answer.items() if name != "score"}
    metrics = {name: value for name, value in others.items() if value is not None and math.isfinite(value)}
    return Score(_score(answer["score"]), metrics)


def _score(value: object) -> float:
    number = _number(value)
    if number is None:
        raise RewardError(f"returned {'None' if value is None else type(value).__name__}, not a number")
    if not math.isfinite(number):
        raise RewardError(f"returned {number}, not a finite number")
    return number


def _number(value: Any) -> float | None:
    """A number as a float, those of numpy and torch as well; None for anything else, a text that looks like one too."""
    if not hasattr(type(value), "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # what has several numbers is none
        return None


def is_network_error(error: BaseException) -> bool:
    """Whether calling again may help: an OSError that is not about files, or an error of a network client."""
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError):
        return False
    packages = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return isinstance(error, OSError) or bool(packages & set(NETWORK_LIBRARIES))


def one_line(error: BaseException) -> str:
    """The error for a person; a RewardError is its message alone."""
    text = error.message if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:LONGEST_LINE].removesuffix(":")
