"""Benchmarks, plots and committed results. Nothing imports this room."""
