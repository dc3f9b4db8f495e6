"""Ways to move a published version, one per file, both ends in it (floor 3)."""

from __future__ import annotations
