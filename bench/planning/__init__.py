"""Plans: how good they are, how fast they are made, and the papers' figures beside them."""
