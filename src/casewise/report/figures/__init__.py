"""The figures: each file draws one, from tidy frames, and returns a matplotlib Figure."""
