"""Writes docs/configuration.md and docs/migrating_from_verl.md from the sections of the configuration and the table of
verl's keys.

python scripts/make_config_docs.py
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from paceline.core.key_table import KeyDescription, describe_keys
from paceline.core.verl_keys import Status, VerlKey, verl_keys

DOCS = Path(__file__).resolve().parent.parent / "docs"
CONFIGURATION = DOCS / "configuration.md"
MIGRATION = DOCS / "migrating_from_verl.md"
CONFIGURATION_HEAD = """# Configuration

Every key with its type, its default and what it means. `paceline config WORD...` searches the same table on the
command line. A run takes keys as `key.sub=value` arguments, or from a YAML file with `-c FILE.yaml`; arguments win.
`none` is written `null` in YAML. An unknown key, a value of the wrong type and a combination that cannot work are
refused in one line before anything starts; the resolved configuration of a run is its `config.yaml`.

This page is made from `paceline/core/sections/` by `scripts/make_config_docs.py`.
"""
MIGRATION_HEAD = """# Coming from verl's fully_async_policy

The formulas of admission and the names of the asynchronous part are the same; `actor_rollout_ref.` falls away. The
same table answers on the command line: an unknown key of verl is refused with its name here. Shell commands of verl
that pass keys as `a.b=c` can be passed to `paceline train` and corrected until nothing is refused.

What to know beside the names:

- One update is one optimiser step over `actor.ppo_mini_batch_size * async_training.require_batches` prompts.
- `algorithm.rollout_correction.bypass_mode=false` takes the weights of the last sync as the proximal policy, as verl
  does; in the first update after a sync that is the trained policy itself and costs no pass of its own.
- Data files in verl's schema are read as they are, and so is a reward file with `compute_score`.
- Metrics have verl's names where verl has one.

This table is made from `paceline/core/verl_keys.py` by `scripts/make_config_docs.py`.
"""
TITLES: dict[Status, str] = {
    "same": "The same",
    "renamed": "Renamed",
    "irrelevant": "Irrelevant here: one answer is built in",
    "unsupported": "Unsupported",
}


def render_configuration() -> str:
    """One table per section."""
    parts = [CONFIGURATION_HEAD]
    for section, rows in groupby(describe_keys(), lambda row: row.key.partition(".")[0]):
        parts.append(f"## `{section}`\n\n{_key_table(rows)}\n")
    return "\n".join(parts)


def render_migration() -> str:
    """One table per status."""
    parts = [MIGRATION_HEAD]
    for status, rows in groupby(verl_keys(), lambda row: row.status):
        parts.append(f"## {TITLES[status]}\n\n{_verl_table(status, rows)}\n")
    return "\n".join(parts)


def _key_table(rows: Iterable[KeyDescription]) -> str:
    lines = [f"| `{row.key}` | {row.type} | `{row.default}` | {_cell(row.meaning)} |" for row in rows]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *lines])


def _verl_table(status: Status, rows: Iterable[VerlKey]) -> str:
    if status == "renamed":
        lines = [f"| `{row.key}` | `{row.here}` | {_cell(row.note)} |" for row in rows]
        return "\n".join(["| verl | here | note |", "|---|---|---|", *lines])
    word = {"same": "note", "irrelevant": "why", "unsupported": "instead, or why"}[status]
    lines = [f"| `{row.key}` | {_cell(row.note)} |" for row in rows]
    return "\n".join([f"| key | {word} |", "|---|---|", *lines])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    CONFIGURATION.write_text(render_configuration(), encoding="utf-8")
    MIGRATION.write_text(render_migration(), encoding="utf-8")
    print(f"wrote {CONFIGURATION} and {MIGRATION}")


if __name__ == "__main__":
    main()
