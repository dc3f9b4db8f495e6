"""Arithmetic of weights: what tensors a model has, where their bytes lie in an arena, what proves them (floor 1)."""

from __future__ import annotations
