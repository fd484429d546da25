"""Alarms over a stream of decisions: each false with probability at most its delta, however long the stream runs."""
