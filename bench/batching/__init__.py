"""Batches of streams: simulated, beside other packages, and what loading costs."""
