"""What a policy would gain on a dataset, without training on it."""
