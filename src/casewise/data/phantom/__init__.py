"""Phantom cohorts: synthetic images for demos and tests, not evidence."""

from __future__ import annotations

from casewise.data.phantom.cardiac import cardiac_cohort
from casewise.data.phantom.streets import driving_cohort

__all__ = ["cardiac_cohort", "driving_cohort"]
