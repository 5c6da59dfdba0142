"""``odc run``: on-demand communication for a script that knows nothing of it."""
