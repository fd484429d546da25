"""Pages: reports of studies, comparisons, fits, predictions, certificates and benchmarks, rendered from templates."""
