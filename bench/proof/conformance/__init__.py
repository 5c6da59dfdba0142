"""Conformance: one training script, once over FSDP's collectives and once after ``odc.patch_fsdp``, cell by cell."""
