"""FSDP2: ``fully_shard`` and its parameter groups."""
