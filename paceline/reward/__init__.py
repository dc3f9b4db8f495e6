"""Reward functions: each scores one response, and fails for that response alone. Floor 3."""
