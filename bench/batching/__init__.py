"""Batches of data streams: how many there are, how long ranks wait, what loading costs."""
