"""Benchmarks and committed results: ``odc bench``. Nothing but the command line imports this room."""
