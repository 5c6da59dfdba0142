"""What the primitives and their host work cost."""
