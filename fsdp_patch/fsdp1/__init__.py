"""FSDP1: ``FullyShardedDataParallel`` and its flat parameters."""
