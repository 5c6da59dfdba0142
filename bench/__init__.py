"""Benchmarks and committed results: ``odc bench``. Only the command line imports this room."""
