"""Shared records, errors, registries and seeds. Standard library and NumPy only."""
