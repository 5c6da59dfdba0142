"""Rearrange samples that the ranks already have: which rank gets which batch, so that all finish together."""
