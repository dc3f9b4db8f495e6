"""Nouns of paceline: records, errors, ports, integer law. Importable without torch and ray; does no I/O."""
