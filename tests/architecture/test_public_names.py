"""Public names: what the README lists, what `__all__` says and what can be imported are the same."""

from __future__ import annotations

import re

import paceline
from tests.architecture.source_tree import ROOT

HEADING = re.compile(r"^#+ Public names\s*$")
NAME = re.compile(r"`([A-Za-z_][A-Za-z0-9_]*)`")
FIRST_CELL = re.compile(r"^\s*(?:[-*]|\|)\s*(`[^|:-]*)")


def documented_names(text: str) -> list[str]:
    """Names in back quotes that open a list item or a table row under the heading "Public names".

    One entry may hold several names: "- `MessageQueue`, `MessageQueueClient`: ...". What follows the first ":", "-" or
    "|" is prose and may quote anything.
    """
    names: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.startswith("#"):
            inside = bool(HEADING.match(line))
        elif inside and (opening := FIRST_CELL.match(line)):
            names.extend(NAME.findall(opening.group(1)))
    return names


def test_the_readme_lists_the_public_names() -> None:
    documented = documented_names((ROOT / "README.md").read_text(encoding="utf-8"))
    assert sorted(documented) == sorted(name for name in paceline.__all__ if not name.startswith("__"))


def test_every_public_name_resolves() -> None:
    assert len(set(paceline.__all__)) == len(paceline.__all__)
    missing = [name for name in paceline.__all__ if not hasattr(paceline, name)]
    assert not missing


def test_dir_shows_the_public_names() -> None:
    assert set(paceline.__all__) <= set(dir(paceline))


def test_only_listed_names_count() -> None:
    text = "\n".join(
        [
            "# T",
            "- `Before`: not here",
            "## Public names",
            "Prose with `Quoted`.",
            "- `A`, `B`: uses `C`",
            "| `D` | wraps `E` |",
            "|---|---|",
            "## Next",
            "- `After`",
        ]
    )
    assert documented_names(text) == ["A", "B", "D"]
