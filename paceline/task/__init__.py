"""Embedded tasks: problems, their split and their score. Floor 1: no torch, no I/O, no state."""
