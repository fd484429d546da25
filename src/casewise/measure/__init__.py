"""Measurements: fragmentation of two masks, harm of three, metrics of a mask and its label. NumPy and SciPy only."""
