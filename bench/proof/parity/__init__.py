"""Training scripts made up by chance, each run over FSDP's collectives and under ODC."""
