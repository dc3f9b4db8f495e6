"""Wiring: which class serves which port, where each part runs, and who supervises it."""
