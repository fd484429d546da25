"""Proposes candidate masks for one case, with torch. ``episode.py`` has the loop of updates; read it first."""
