"""Inference engines: one set of weights, many sequences, no knowledge of replicas, syncs or processes."""

from __future__ import annotations
