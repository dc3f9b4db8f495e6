"""A configuration file and dotted overrides, made into a checked `Config`.

The file gives a tree, each `key.sub=value` replaces one value in it, later ones win; values are YAML. Everything that
can be wrong with either is a `ConfigError` of one line.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from paceline.core.config import Config, build_config
from paceline.core.errors import ConfigError


def load_config(file: Path | None, overrides: Sequence[str]) -> Config:
    """The configuration of a command line.

    Raises:
        ConfigError: what is wrong, with the file or the override, in one line.
    """
    tree = OmegaConf.create({}) if file is None else _read(file)
    for override in overrides:
        _check_form(override)
        with _named(override):
            tree.merge_with_dotlist([override])
    with _named("the configuration"):
        plain = OmegaConf.to_container(tree, resolve=True)
    if not isinstance(plain, dict):
        raise ConfigError("the configuration has to be a mapping of keys to values")
    return build_config({str(key): value for key, value in plain.items()})


def _read(file: Path) -> DictConfig:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {file}: no UTF-8 text (byte {error.start})") from error
    with _named(str(file)):
        tree = OmegaConf.load(io.StringIO(text))
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{file}: has to be a mapping of keys to values, not a list")
    return tree


def _check_form(override: str) -> None:
    key, equals, _ = override.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        raise ConfigError(f"{override!r} is not of the form key.sub=value")


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Turn what YAML and OmegaConf raise into one line that begins with `where`."""
    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{where}: {place}{error.problem or 'no YAML'}") from error
    # OmegaConf answers a file that holds a single number with an OSError, and a bad path into a list with a TypeError.
    except (yaml.YAMLError, OmegaConfBaseException, OSError, TypeError, ValueError) as error:
        lines = str(error).strip().splitlines()
        raise ConfigError(f"{where}: {lines[0] if lines else type(error).__name__}") from error
