"""Bounds on the harm of the deployed masks, with the number of labelled cases that each needs (T1-T6, T8, T9)."""
