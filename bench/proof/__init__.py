"""Seeded programs that look for faults which no test was written for, and the conformance table."""
