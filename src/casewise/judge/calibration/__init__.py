"""Fit a policy on a holdout: cut-points and z-statistics without labels, budget and tau with them (F1-F12)."""
