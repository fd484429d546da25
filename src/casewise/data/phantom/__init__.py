"""Phantom cohorts: made, not measured. They show the system; they are not evidence."""

from __future__ import annotations

from casewise.data.phantom.cardiac import cardiac_cohort
from casewise.data.phantom.driving import driving_cohort

__all__ = ["cardiac_cohort", "driving_cohort"]
