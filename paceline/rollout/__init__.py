"""Rollout loops: prompts in, scored samples out. Adapters come in through `core.ports`. Floor 4."""
