"""Reads the source tree for the architecture tests: files, syntax trees, and every import with its line.

Nothing here imports the package: what a file says is judged, wherever the statement stands (module level, function, or
under `if TYPE_CHECKING`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "paceline"


@dataclass(frozen=True)
class Source:
    """One Python file: its path relative to the repository's root, and its text."""

    path: str
    text: str

    @property
    def module(self) -> str:
        """Dotted name, e.g. `paceline.core.errors`; a package is named without `__init__`."""
        parts = self.path.removesuffix(".py").split("/")
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        """What stands right under the package (`core`, `message_queue`), or "" for the package's own `__init__`."""
        _, _, inner = self.module.partition(".")
        return inner.split(".")[0]

    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.path)


@dataclass(frozen=True)
class Import:
    """One imported module: `names` are what a `from` import takes from it, empty for `import module`."""

    module: str
    names: tuple[str, ...]
    line: int

    @property
    def top(self) -> str:
        return self.module.split(".")[0]


def sources(*folders: str) -> list[Source]:
    """Every Python file under `folders` of the repository, in a stable order."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return [Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


def imports(source: Source) -> list[Import]:
    """Every import of `source`, relative ones resolved, `import_module("literal")` included."""
    found: list[Import] = []
    for node in ast.walk(source.tree()):
        found.extend(_imports_of(node, source))
    return found


def _imports_of(node: ast.AST, source: Source) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, (), node.lineno)
    elif isinstance(node, ast.ImportFrom):
        yield Import(_absolute(node, source), tuple(alias.name for alias in node.names), node.lineno)
    elif isinstance(node, ast.Call) and called_name(node) in ("import_module", "__import__") and node.args:
        argument = node.args[0]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield Import(argument.value, (), node.lineno)


def _absolute(node: ast.ImportFrom, source: Source) -> str:
    if node.level == 0:
        return node.module or ""
    parts = source.module.split(".")
    is_package = source.path.endswith("/__init__.py")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def called_name(node: ast.Call) -> str:
    """The last name of what is called: `load` for `torch.load(...)`, "" for anything without a name."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""
