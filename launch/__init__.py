"""``odc run``: on-demand communication for unmodified scripts."""
