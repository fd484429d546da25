"""Bounds on the harm that is really deployed, with the number of labelled cases that each needs (C1-C8)."""
