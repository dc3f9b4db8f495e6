"""Versioned arenas of one node: who may write, who holds which version, and how a reader gets at it (floor 2)."""

from __future__ import annotations
