"""Simulated worlds for tests and benchmarks: cohorts, risks and streams whose truth is known."""
