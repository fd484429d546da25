"""Trajectories on disk: what an archive looks like, how it is written and read, and how it is checked."""
