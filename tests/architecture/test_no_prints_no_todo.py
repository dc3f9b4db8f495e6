"""Only the front door prints, and nothing is left to be done later in a comment."""

from __future__ import annotations

import ast
import io
import tokenize

import pytest

from tests.architecture.source_tree import PACKAGE, Source, called_name, sources

UNFINISHED = ("TODO", "FIXME", "XXX", "HACK")


def prints(source: Source) -> list[str]:
    """Calls of the builtin `print` and writes to the standard streams, one line each."""
    found: list[str] = []
    for node in ast.walk(source.tree()):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and called_name(node) == "print":
            found.append(f"{source.path}:{node.lineno}: print")
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("sys.stdout.write", "sys.stderr.write"):
            found.append(f"{source.path}:{node.lineno}: {ast.unparse(node.func)}")
    return found


def unfinished(source: Source) -> list[str]:
    """Comments that put work off, one line each."""
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    return [f"{source.path}:{c.start[0]}: {c.string}" for c in comments if any(word in c.string for word in UNFINISHED)]


def test_only_the_front_door_prints() -> None:
    found = [line for source in sources(PACKAGE) if source.room != "cli" for line in prints(source)]
    assert not found, "\n".join(found)


def test_nothing_is_left_for_later() -> None:
    found = [line for source in sources("paceline", "tests", "scripts") for line in unfinished(source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("text", ["def f():\n    print(1)", "import sys\nsys.stderr.write('x')"])
def test_a_print_is_seen(text: str) -> None:
    assert len(prints(Source("paceline/core/a.py", text))) == 1


def test_a_method_named_print_is_no_print() -> None:
    assert prints(Source("paceline/observability/a.py", "console.print('x')")) == []


@pytest.mark.parametrize("word", UNFINISHED)
def test_unfinished_work_is_seen(word: str) -> None:
    assert len(unfinished(Source("a.py", f"x = 1  # {word}: later\n"))) == 1
    assert unfinished(Source("a.py", f"x = '{word}'\n")) == []
