"""Proposes candidate masks for one case: the torch half. ``episode.py`` is the only loop; start there."""
