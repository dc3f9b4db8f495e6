"""Sizes: a file is read in one sitting, a function is seen at once."""

from __future__ import annotations

import ast

from tests.architecture.source_tree import Source, sources

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def size_violations(source: Source) -> list[str]:
    """The file and those of its functions that are too long, one line each; decorators count."""
    lines = len(source.text.splitlines())
    found = [f"{source.path}: {lines} lines, at most {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []
    for node in ast.walk(source.tree()):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            length = (node.end_lineno or node.lineno) - first + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{source.path}:{first}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
    return found


def test_files_and_functions_are_short() -> None:
    violations = [line for source in sources("paceline", "tests", "scripts") for line in size_violations(source)]
    assert not violations, "\n".join(violations)


def test_a_long_file_is_refused() -> None:
    assert size_violations(Source("a.py", "x = 1\n" * MAX_FILE_LINES)) == []
    assert size_violations(Source("a.py", "x = 1\n" * (MAX_FILE_LINES + 1))) == ["a.py: 401 lines, at most 400"]


def test_a_long_function_is_refused() -> None:
    body = "    x = 1\n" * (MAX_FUNCTION_LINES - 1)
    assert size_violations(Source("a.py", f"def f():\n{body}")) == []
    assert size_violations(Source("a.py", f"@g\ndef f():\n{body}")) == ["a.py:1: f has 61 lines, at most 60"]
    assert len(size_violations(Source("a.py", f"class A:\n async def f():\n{body}    y = 2\n"))) == 1
