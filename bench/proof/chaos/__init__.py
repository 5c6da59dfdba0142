"""Ranks that die, stop, raise and leave at any time, and how the others end."""
