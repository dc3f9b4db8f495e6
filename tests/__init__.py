"""Tests mirror the rooms of the package."""
