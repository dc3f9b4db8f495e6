"""Writes docs/events.md, the schema of the event log, from the docstrings and fields of paceline/core/events.py.

python scripts/make_event_docs.py
"""

from __future__ import annotations

import inspect
import typing
from pathlib import Path

import msgspec

from paceline.core import events

TARGET = Path(__file__).resolve().parent.parent / "docs" / "events.md"
HEAD = """# The event log

Every process of a run appends its events to the run's one `events.jsonl`, one JSON object per line. A line begins
with `t` (unix seconds), `proc` (role of the process that wrote it) and `seq` (rises by one per process; a gap is an
event that could not be written), then come `kind` and the fields below. Lines of one process stand in its order, lines
of different processes may cross. Durations are in seconds; a version is one integer, `life << 40 | n`; a number that
is not finite is null. `summary.json`, the display and TensorBoard are folds over this file; `paceline report RUN_DIR`
folds it again.

This page is made from `paceline/core/events.py` by `scripts/make_event_docs.py`.
"""


def render() -> str:
    """The page as Markdown: one section per kind, in the order of the source."""
    kinds = typing.get_args(events.AnyEvent)
    return "\n".join([HEAD, *(_section(kind) for kind in kinds)])


def _section(kind: type[msgspec.Struct]) -> str:
    hints = typing.get_type_hints(kind)
    rows = [f"| `{name}` | `{_type_name(hints[name])}` |" for name in kind.__struct_fields__]
    table = "\n".join(["| field | type |", "|---|---|", *rows])
    return f"## `{kind.__struct_config__.tag}`\n\n{inspect.cleandoc(kind.__doc__ or '')}\n\n{table}\n"


def _type_name(hint: object) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(f'"{value}"' for value in typing.get_args(hint))
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def main() -> None:
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(render(), encoding="utf-8")
    print(f"wrote {TARGET}")


if __name__ == "__main__":
    main()
