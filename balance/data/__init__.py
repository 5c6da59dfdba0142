"""From a dataset to the microbatches of one rank."""
