"""Wires between ranks: one small ABC, a registry, one file per transport."""
