"""Bounds on the harm that is really deployed, with the number of labelled cases that each needs (T1-T6, T8, T9)."""
