"""Seeded programs that look for what nobody has thought of, and the conformance table."""
