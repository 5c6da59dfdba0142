"""One document from the benchmarks that make sense on a machine without GPUs: ``odc bench report``."""
