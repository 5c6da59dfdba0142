"""Plans: how good, how fast, and beside the papers' figures."""
