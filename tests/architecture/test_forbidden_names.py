"""Names and shapes that are not allowed anywhere: rooms for leftovers, silent catch-alls, unpickling."""

from __future__ import annotations

import ast
import re

import pytest

from tests.architecture.source_tree import PACKAGE, Source, imports, sources

LEFTOVERS = {"utils", "util", "common", "helpers", "helper", "misc"}
BROAD = {"Exception", "BaseException"}
REASON = re.compile(r"#\s+(?!noqa|type:|pragma)\w")
UNPICKLERS = ("pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib")


def leftover_rooms(source: Source) -> list[str]:
    """Parts of the module's name that say nothing about what is in it; `weight_utils` counts as well."""
    words = {word for part in source.module.split(".") for word in (part, part.rsplit("_", 1)[-1])}
    return [f"{source.path}: {word}" for word in sorted(words & LEFTOVERS)]


def broad_excepts(source: Source) -> list[str]:
    """Handlers that catch everything without a comment on their line or on the line above or below it."""
    lines = source.text.splitlines()
    found: list[str] = []
    for node in ast.walk(source.tree()):
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type):
            around = lines[max(node.lineno - 2, 0) : node.lineno + 1]
            if not any(REASON.search(line) for line in around):
                found.append(f"{source.path}:{node.lineno}: a broad except without its reason")
    return found


def _is_broad(caught: ast.expr | None) -> bool:
    if caught is None:
        return True
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(isinstance(kind, ast.Name) and kind.id in BROAD for kind in kinds)


def unpicklers(source: Source) -> list[str]:
    """Imports of libraries that run code found in the bytes they read."""
    return [f"{source.path}:{found.line}: {found.top}" for found in imports(source) if found.top in UNPICKLERS]


def test_no_room_for_leftovers() -> None:
    found = [line for source in sources("paceline", "tests", "scripts") for line in leftover_rooms(source)]
    assert not found, "\n".join(found)


def test_every_broad_except_says_why() -> None:
    found = [line for source in sources("paceline", "scripts") for line in broad_excepts(source)]
    assert not found, "\n".join(found)


def test_nothing_is_unpickled() -> None:
    found = [line for source in sources(PACKAGE) for line in unpicklers(source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "path", ["paceline/utils.py", "paceline/sync/helpers/a.py", "paceline/weights/tensor_utils.py"]
)
def test_a_room_for_leftovers_is_refused(path: str) -> None:
    assert len(leftover_rooms(Source(path, ""))) == 1


@pytest.mark.parametrize("clause", ["except Exception:", "except:", "except (ValueError, BaseException) as error:"])
def test_a_broad_except_without_a_reason_is_refused(clause: str) -> None:
    assert len(broad_excepts(Source("a.py", f"try:\n    f()\n{clause}\n    pass\n"))) == 1
    assert (
        broad_excepts(Source("a.py", f"try:\n    f()\n{clause}  # one bad plug-in must not end the run\n    pass\n"))
        == []
    )


def test_a_directive_is_no_reason() -> None:
    assert len(broad_excepts(Source("a.py", "try:\n    f()\nexcept Exception:  # noqa: BLE001\n    pass\n"))) == 1


def test_a_narrow_except_passes() -> None:
    assert broad_excepts(Source("a.py", "try:\n    f()\nexcept ValueError:\n    pass\n")) == []


def test_an_unpickler_is_refused() -> None:
    assert len(unpicklers(Source("paceline/store/a.py", "from pickle import loads"))) == 1
