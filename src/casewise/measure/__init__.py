"""Two masks become fragmentation, three masks become harm, a mask and a label become metrics. NumPy and SciPy only."""
