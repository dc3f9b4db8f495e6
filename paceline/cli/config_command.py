"""`paceline config`: the keys of the configuration, all of them or those that match."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

from paceline.core.config import near_keys
from paceline.core.errors import ConfigError
from paceline.core.key_table import matching_keys

NARROWEST = 60
WIDEST = 120


def show_config(words: Sequence[str]) -> int:
    """Print key, type, default and meaning of every key that holds all words; returns 0.

    Raises:
        ConfigError: there is none.
    """
    pattern = " ".join(words)
    rows = matching_keys(pattern)
    if not rows:
        near = near_keys(pattern)
        hint = f"; is it one of {', '.join(near)}?" if near else ""
        raise ConfigError(f"no key matches {pattern!r}{hint}")
    width = max(NARROWEST, min(WIDEST, shutil.get_terminal_size().columns))
    for row in rows:
        print(f"{row.key} = {row.default or repr('')}  ({row.type})")
        print(textwrap.fill(row.meaning, width, initial_indent="    ", subsequent_indent="    "))
    return 0
