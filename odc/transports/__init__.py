"""Transports connect ranks: a small abstract class, a registry, one file per transport."""
