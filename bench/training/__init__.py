"""Training: real models on CPU ranks, and emulated compute."""
