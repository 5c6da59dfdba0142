"""What all benchmarks share: options, ranks, progress, tables, JSON, pictures, committed figures."""
