"""Conformance: a table of FSDP's options, each cell trained over FSDP's collectives and under ODC."""
