"""Words that everyone shares: records, errors, registries, seeds. Standard library and NumPy only."""
