"""Archives of trajectories on disk: layout, writing, reading and checking."""
