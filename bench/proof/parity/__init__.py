"""Training scripts made up by chance, with and without ODC."""
